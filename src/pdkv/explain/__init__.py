"""Where the memory of a decode instance goes: from its start-up log or its metrics, with the numbers recomputed."""
