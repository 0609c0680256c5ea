"""The log between trainers and predictors: its objects, its entries, and where they are kept."""
