"""How the numbers of an NVFP4 matrix are found: block scales by a policy, codes with or without error compensation."""
