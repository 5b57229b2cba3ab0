"""The operating system as dpex sees it: clocks, CPUs, memory, processes, GPUs."""
