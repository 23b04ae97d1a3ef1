"""The simulator: how long a step takes, from its summary and a cluster, by replaying it on their resources.

Reading order: ``tasks`` (what the items of a summary occupy), ``fusion`` (which ops are one kernel), ``chains`` and
``order`` (how repeated blocks follow each other), ``clock`` (when everything runs), ``predict`` (the sums), ``record``
and ``trace`` (export).
"""

from meshwright.compiler.timeline.fusion import FUSIONS
from meshwright.compiler.timeline.predict import simulate
from meshwright.compiler.timeline.trace import write_trace

__all__ = ["FUSIONS", "simulate", "write_trace"]
