"""Low-overhead metrics and events.

Open ``monitor.py`` first. The functions of this package are the methods of the program's default :class:`Monitor`.
Trackers, publishers and predictors record the metrics listed in ``library.py`` with the recorders of ``recorder.py``.
From the rest of the library, this package imports only ``errors``, ``live_objects`` and ``buffers``.
"""

from delta_tracker.monitor.event import Event as Event
from delta_tracker.monitor.event import Severity as Severity
from delta_tracker.monitor.monitor import MONITOR as MONITOR
from delta_tracker.monitor.monitor import Monitor as Monitor
from delta_tracker.monitor.policy import Window as Window
from delta_tracker.monitor.stat import Kind as Kind

metrics = MONITOR.metrics
counter = MONITOR.counter
gauge = MONITOR.gauge
stat = MONITOR.stat
histogram = MONITOR.histogram
passive = MONITOR.passive
configure = MONITOR.configure
find = MONITOR.find
log = MONITOR.log
emit = MONITOR.emit
span = MONITOR.span
on = MONITOR.on
limit_events = MONITOR.limit_events
step = MONITOR.step
end_epoch = MONITOR.end_epoch
start = MONITOR.start
stop = MONITOR.stop
flush = MONITOR.flush
collect = MONITOR.collect
