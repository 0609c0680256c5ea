"""Simulated CUDA devices with streams, on machines without a GPU. Start with ``simulation.py``.

Inside ``with fake_streams(seed) as devices`` the library and the test use ``torch.cuda`` as on a GPU: tensors on
``"cuda"``, streams, events, non-blocking copies and pinned memory. A call of an operation on such a tensor appends the
operation to the queue of the current stream. It runs later, in an order that the seed chooses among the orders that a
GPU allows. Code without a necessary wait computes with the wrong data for some seeds, and ``order.py``
reports it for each seed.
"""
