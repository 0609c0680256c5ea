"""MovieLens in time order: two ranks train, a predictor process follows their stream and scores what comes next."""
