"""Workers on another machine: a process there that keeps a pool of local workers, and the trainer's end of it."""
