"""Published measurements of training runs, predicted: ``python -m benchmarks.published``.

Of every row the module is built at the row's shape, captured at the row's global batch, compiled by the row's plan
and priced on the row's cluster, as the planner prices its candidates; nothing here knows a formula of a step's time.
"""
