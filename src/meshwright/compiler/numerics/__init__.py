"""What half precision costs a step: predicted errors of its sums, and findings about those that are too large."""
