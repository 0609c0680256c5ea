"""Low-overhead metrics and events.

Open ``monitor.py`` first. The functions of this package are the methods of the program's default :class:`Monitor`.
Trackers, publishers and predictors record the metrics listed in ``library.py`` with the recorders of ``recorder.py``.
From the rest of the library, this package imports only ``errors`` and ``forking``.
"""

from delta_tracker.monitor.default import MONITOR, metrics
from delta_tracker.monitor.event import Event, Severity
from delta_tracker.monitor.monitor import Monitor
from delta_tracker.monitor.policy import Window
from delta_tracker.monitor.stat import Kind

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

__all__ = [
    "MONITOR",
    "Event",
    "Kind",
    "Monitor",
    "Severity",
    "Window",
    "collect",
    "configure",
    "counter",
    "emit",
    "end_epoch",
    "find",
    "flush",
    "gauge",
    "histogram",
    "limit_events",
    "log",
    "metrics",
    "on",
    "passive",
    "span",
    "start",
    "stat",
    "step",
    "stop",
]
