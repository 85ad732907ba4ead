"""What must be set before a process starts: cores, memory, threads, allocator.

Nothing here imports torch: it runs in the launcher, and before torch in the process it starts.
"""
