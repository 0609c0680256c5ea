"""Record which rows of a sharded model changed, and give each consumer its own delta.

Open ``tracker.py`` first: it has the public class, which delegates. ``change_log.py`` marks rows for the hooks, in
the stores of ``store/``, and compacts them; ``modes.py`` says what each tracking mode keeps of a row;
``consumer_positions.py`` keeps the position of each consumer; ``delta_reader.py`` builds what a consumer reads;
``consumer_handle.py`` is what a publisher holds; ``checkpoint/`` saves all of it. Does not import ``stream``.
"""
