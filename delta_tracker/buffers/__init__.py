"""Host memory: buffers that are reused, and copies of device tensors.

Open ``pool.py`` first: it has the pool of buffers. ``host_copy.py`` copies a device tensor to pinned memory.
"""

from delta_tracker.buffers.pool import MEMORY as MEMORY
from delta_tracker.buffers.pool import BufferPool as BufferPool
from delta_tracker.buffers.pool import capacity as capacity
from delta_tracker.buffers.pool import new_rows as new_rows
