"""From a model and a prompt to text: sampling, stop rules and the cached decode engine."""
