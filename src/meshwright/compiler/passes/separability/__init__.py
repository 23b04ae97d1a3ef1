"""What couples the samples of a batch: found, told, and declared to mean something when the batch is cut.

A step may be cut into microbatches without changing its meaning where its loss is a sum over samples, divided by counts
of the whole batch. What is more than that couples samples: batch statistics, balance losses, contrastive losses,
capacities counted over the batch.
"""

from meshwright.compiler.passes.separability.couplings import Coupling, couplings
from meshwright.compiler.passes.separability.findings import called, findings, undeclared
from meshwright.compiler.passes.separability.fits import check_fits, without_fit

__all__ = ["Coupling", "called", "check_fits", "couplings", "findings", "undeclared", "without_fit"]
