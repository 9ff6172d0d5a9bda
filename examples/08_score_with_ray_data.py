"""Scores for a dataset of any size with Ray Data: a trained model is a function of one batch.

Run it with `python examples/08_score_with_ray_data.py`. It starts a local cluster and takes half a minute. It needs Ray
Data, which is not installed with iresnet: `pip install "ray[data]"`.

The same function works with Spark: `frame.mapInPandas(lambda batches: map(scorer, batches), schema)`.
"""

import logging
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import ray

from iresnet import run
from iresnet.presets import PRESETS, with_overrides
from iresnet.run import Scorer

# A table: what machines do in an ordinary hour. The load and the temperature go together.
rng = np.random.default_rng(0)
load = rng.uniform(0, 1, 4000)
table = pd.DataFrame({"machine": [f"m{i % 40}" for i in range(4000)], "load": load})
table["temperature"] = 40 + 30 * load + rng.normal(0, 1, 4000)

# One machine is hot while it has nothing to do; each of the numbers alone is an ordinary one.
table.loc[1234, ["load", "temperature"]] = [0.05, 68.0]

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "hours.csv"
    table.to_csv(path, index=False)

    # A small model, trained for some seconds. A large one is trained in the same way, or by the command.
    changes = [
        f'data.source="{path}"',
        'data.id="machine"',
        "training.epochs=0",
        "training.steps=60",
        "network.components=1",
    ]
    trained = run.start(with_overrides(PRESETS["table-density"], changes), Path(folder) / "run").run

    # A scorer holds the path of the run, not the model, so it is small to send; a worker loads the model. The scores of
    # a row depend neither on the batch nor on the worker.
    scorer = Scorer(trained.folder)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    hours = ray.data.from_pandas(table).repartition(8)
    scores = hours.map_batches(scorer, batch_size=500).to_pandas()
    ray.shutdown()

    # Without a cluster, the same function scores the same table at once.
    at_once = scorer(table)

scores = scores.sort_values(["machine", "load"]).reset_index(drop=True)
at_once = at_once.sort_values(["machine", "load"]).reset_index(drop=True)
assert np.allclose(scores["log_likelihood"], at_once["log_likelihood"], atol=1e-4)

strangest = scores.sort_values("log_likelihood").head(3)
print(strangest[["machine", "load", "temperature", "log_likelihood", "anomaly"]])
assert strangest.iloc[0]["temperature"] == 68.0
