"""The noise of a Kalman filter by maximum likelihood: a gradient through `scan`.

The local level model: a level that wanders, and a measurement of it each year,

    flow[t] = level[t] + N(0, measured),   level[t + 1] = level[t] + N(0, wandering).

For the flow of the Nile at Aswan, Durbin and Koopman (Time Series Analysis by State
Space Methods, 2nd edition, 2012, chapter 2) estimate the two variances as 15099 and
1469.1. BFGS finds the same here, by the derivative of the filter itself.
"""

import math
import sys

from scipy.optimize import minimize

import hopflow as hf

# 10^8 cubic metres a year, 1871 to 1970: data set `Nile` of R.
NILE = """
1120 1160  963 1210 1160 1160  813 1230 1370 1140  995  935 1110  994 1020  960 1180
 799  958 1140 1100 1210 1150 1250 1260 1220 1030 1100  774  840  874  694  940  833
 701  916  692 1020 1050  969  831  726  456  824  702 1120 1100  832  764  821  768
 845  864  862  698  845  744  796 1040  759  781  865  845  944  984  897  822 1010
 771  676  649  846  812  742  801 1040  860  874  848  890  744  749  838 1050  918
 986  797  923  975  815 1020  906  901 1170  912  746  919  718  714  740
"""
PUBLISHED = {"measured": 15099.0, "wandering": 1469.1}


def surprise(log_variances, flow):
    """Minus the log-likelihood of the years after the first, but for a constant."""
    measured, wandering = hf.exp(log_variances)

    def year(belief, observed):
        level, variance = belief  # before this year's flow is known
        error, spread = observed - level, variance + measured
        gain = variance / spread
        level, variance = level + gain * error, (1 - gain) * variance + wandering
        return (level, variance), hf.log(spread) + error**2 / spread

    # Of the level nothing is known at first: all that is believed is the first year.
    _, terms = hf.scan(year, (flow[0], measured + wandering), flow[1:])
    return hf.sum(terms) / 2


def main():
    flow = hf.asarray([float(word) for word in NILE.split()], dtype=hf.float64)
    derived = hf.jit(hf.value_and_grad(surprise))

    def objective(log_variances):
        value, slope = derived(hf.asarray(log_variances), flow)
        return value.item(), slope

    fit = minimize(objective, x0=[9.0, 9.0], jac=True, method="BFGS")
    estimates = [math.exp(x) for x in fit.x]
    for (name, published), estimate in zip(PUBLISHED.items(), estimates, strict=True):
        print(f"{name:9}  {estimate:7.1f}  published: {published:7.1f}")
        if abs(estimate - published) > 0.01 * published:
            sys.exit(f"{name} is not within 1 % of what is published")


if __name__ == "__main__":
    main()
