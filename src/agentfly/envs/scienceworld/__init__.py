"""ScienceWorld: the published simulator, called directly: thirty tasks of elementary-school science in a house of ten places.

    java.py       finds Java and the simulator's jar
    jvm.py        one JVM with one thread; many simulators in it, isolated from each other
    jvms.py       the JVMs of this process: started on demand, replaced when dead, terminated when idle
    simulator.py  one simulator: load, step, score, gold path
    env.py        ScienceWorld, the environment; tools.py: scienceworld_explorer(action), scienceworld_get_actions()
    tasks.py      the 30 tasks and their splits as task sets; reward.py; solver.py; demos.py; clip.py shortens observations

Needs the package `scienceworld` (`pip install 'agentfly[scienceworld]'`) and Java 11 or newer. Nothing is imported here.
"""
