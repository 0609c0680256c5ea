"""Where figures and events go: one file for each destination, which imports its package when it is built."""
