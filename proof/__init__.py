"""What shows that no legal order of the streams changes a token: a simulated device, races, exploration, faults put in.

No part of the package that users install. Tests run it.
"""
