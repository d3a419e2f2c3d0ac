"""The processes of a run: starts them, watches them, and starts them again.

trainer                                                   process i
Fleet --Launcher.start(ticket)--------------------------> member_main -> the function that the ticket names
  |    <---- hello, beats, replies --- Link --- beats, calls ---->  Connection
  +-> Role     what the processes are for: first messages, what a loss means

starting --hello--> connected --`Role.prepare`--> live --+
   ^                                                     | ended, silent for `health_s`, main thread blocked
   +--------------- started again <---------------- lost
"""
