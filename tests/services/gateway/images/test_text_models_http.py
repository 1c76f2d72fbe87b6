"""A model of texts alone names the image that it does not take."""

from __future__ import annotations

from tests.services.gateway.conftest import Cluster
from tests.services.gateway.images.conftest import MODEL
from tests.services.gateway.images.test_images_http import DOORS, RESULTS


async def test_a_model_of_texts_takes_no_images(cluster: Cluster) -> None:
    for path, body in (*DOORS.values(), *RESULTS.values()):
        body = {**body, "model": "tiny"} if "model" in body else body
        response = await cluster.http.post(path.replace(MODEL, "tiny"), json=body)
        assert response.status_code == 400, (path, response.text)
        assert "this model takes no images" in response.text
