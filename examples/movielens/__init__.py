"""MovieLens in time order: two ranks train, and a predictor process follows their stream and scores later ratings."""
