"""Stats and events that do not slow training down.

The functions here are the methods of one :class:`Monitor`, the program's. Open ``monitor.py`` first. ``recorder.py`` is
what a tracker, a publisher or a predictor records with, ``library.py`` lists the metrics that they record. The package
imports only ``errors`` and ``forking``.
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
