"""What measures buffet itself. Nothing but its own commands imports it.

bench          what every method costs on this machine
soundness      campaigns that hold every bound against points of random and of extreme networks
reproduce      the paper's evaluation: models, sweeps, figures, tables
random_models  networks with random weights
"""
