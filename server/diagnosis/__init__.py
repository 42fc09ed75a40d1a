"""Why an engine ended, in words a user can act on: a catalogue of patterns over what it left behind."""

from server.diagnosis.catalogue import Diagnosis, Ending, Fault, diagnose, load_catalogue

__all__ = ["Diagnosis", "Ending", "Fault", "diagnose", "load_catalogue"]
