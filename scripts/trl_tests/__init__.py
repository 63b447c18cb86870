"""What scripts/trl_suite.py needs to run the tests of TRL here, in memory and on the engine."""
