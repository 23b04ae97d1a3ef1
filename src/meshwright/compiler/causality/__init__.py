"""On which input tokens does each element of a model's output depend? Read off a run of the model, op by op."""
