"""Predictions on a calibrated machine against real steps on its ranks."""
