"""A second reading of causality, for every length at once: intervals of positions, composed over the op rules."""
