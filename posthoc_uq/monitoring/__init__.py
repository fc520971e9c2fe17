"""What comes in, beside held-out data: whether its scores drift, how much of it is referred, what is most novel.

`records` has the scores and their CSV file, `pictures` the thumbnails that are kept, `drift` the tests, `charts` and
`page` what they look like.
"""

from posthoc_uq.monitoring.drift import Drift, drifts
from posthoc_uq.monitoring.page import monitor_page
from posthoc_uq.monitoring.pictures import Picture, Pictures
from posthoc_uq.monitoring.records import Records, ScoreLog

__all__ = ["Drift", "Picture", "Pictures", "Records", "ScoreLog", "drifts", "monitor_page"]
