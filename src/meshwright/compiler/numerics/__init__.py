"""What half precision costs a step: predicted errors of its sums, and findings about those that are too large."""

from meshwright.compiler.numerics.finding import Finding
from meshwright.compiler.numerics.findings import findings

__all__ = ["Finding", "findings"]
