"""Low-overhead metrics and events.

Open ``monitor.py`` first. The functions of this package are the methods of the program's default :class:`Monitor`.
``library.py`` lists the built-in metrics. Trackers, publishers and predictors record them through ``recorder.py``.
From the rest of the library, this package imports only ``arguments``, ``errors``, ``live_objects`` and ``buffers``. A
sink imports its optional dependency in its constructor.
"""

from delta_tracker.monitor.event import Event as Event
from delta_tracker.monitor.event import Severity as Severity
from delta_tracker.monitor.monitor import MONITOR as MONITOR
from delta_tracker.monitor.monitor import Monitor as Monitor
from delta_tracker.monitor.policy import Window as Window
from delta_tracker.monitor.sinks.base_sink import Sink as Sink
from delta_tracker.monitor.sinks.chrome_trace import ChromeTraceSink as ChromeTraceSink
from delta_tracker.monitor.sinks.jsonl import JsonlSink as JsonlSink
from delta_tracker.monitor.sinks.logs import LoggingSink as LoggingSink
from delta_tracker.monitor.sinks.mlflow import MlflowSink as MlflowSink
from delta_tracker.monitor.sinks.opentelemetry import OpenTelemetrySink as OpenTelemetrySink
from delta_tracker.monitor.sinks.prometheus import PrometheusFileSink as PrometheusFileSink
from delta_tracker.monitor.sinks.prometheus import PrometheusSink as PrometheusSink
from delta_tracker.monitor.sinks.tensorboard import TensorBoardSink as TensorBoardSink
from delta_tracker.monitor.sinks.torch_monitor import TorchMonitorSink as TorchMonitorSink
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
