"""From a query to a verdict: only here are verdicts made."""
