"""A second reading of causality: intervals of positions, composed over the op rules."""
