"""Workers on other machines: the agent, a process that runs a pool of local workers on its node, and the trainer's end
of its connection."""
