"""ScienceWorld: the published simulator, driven lean: thirty tasks of elementary-school science in a house of ten places.

    java.py       is there Java, and where is the simulator's jar
    jvm.py        one JVM with a thread of its own; many simulators in it, each as if it were alone
    jvms.py       the JVMs of this process: started when needed, replaced when dead, ended when idle
    simulator.py  one simulator: load, step, score, gold path
    env.py        ScienceWorld, the environment; tools.py: scienceworld_explorer(action), scienceworld_get_actions()
    tasks.py      the 30 tasks and their splits as task sets; reward.py; solver.py; demos.py

Needs the package `scienceworld` (`pip install 'agentfly[scienceworld]'`) and Java 11 or newer. Nothing is imported here.
"""
