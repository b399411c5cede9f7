"""Tests of the router, dispatchers and moe packages."""
