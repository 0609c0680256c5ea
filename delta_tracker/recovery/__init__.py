"""Recovery of a training job from a stream. Read ``random_states.py`` first."""
