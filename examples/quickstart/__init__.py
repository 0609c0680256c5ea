"""A trainer and a predictor of plain torch."""
