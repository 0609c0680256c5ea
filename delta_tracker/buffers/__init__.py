"""Memory management: reusable host buffers, host copies of device tensors, and synchronization of CUDA streams.

Open ``pool.py`` first: it contains the pool of buffers. ``host_copy.py`` copies a device tensor to pinned memory.
``cuda_fence.py`` orders the work of several CUDA streams.
"""

from delta_tracker.buffers.pool import MEMORY as MEMORY
from delta_tracker.buffers.pool import BufferPool as BufferPool
from delta_tracker.buffers.pool import capacity as capacity
from delta_tracker.buffers.pool import new_rows as new_rows
