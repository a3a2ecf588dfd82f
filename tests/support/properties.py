"""Settings of property tests: a slow processor fails none. Their limit is that of every test."""

from hypothesis import HealthCheck, settings

SETTINGS = settings(deadline=None, suppress_health_check=list(HealthCheck))
