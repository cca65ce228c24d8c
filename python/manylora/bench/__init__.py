"""Load on an OpenAI-compatible server, and what it does to the time of each answer: `manylora bench serve`."""
