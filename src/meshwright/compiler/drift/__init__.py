"""Does a model compute the same in training, in evaluation, and token by token with a cache? Read off its runs."""
