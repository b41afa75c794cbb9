"""The rules for everything but matrices, one file each: an `AuxiliaryRule` of the registry."""
