"""Workers on another machine: a process that keeps a pool of local workers there, and the trainer's end of its
connection."""
