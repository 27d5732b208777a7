"""Late policy: a share of the earned points for each day begun after the due date, with a grace period.

Due dates and extensions are the gradebook's: `nbgrader db assignment add LAB --duedate=...` and
`Gradebook.grant_extension`.
"""

from __future__ import annotations

import math

from nbgrader.plugins import BasePlugin
from traitlets import Float, Integer

DAY = 86_400.0


class PerDay(BasePlugin):
    """nbgrader's plugin for late penalties. Set it with `c.PerDay.per_day = 0.1` in the configuration."""

    per_day = Float(0.1, help="share of the earned points that each day begun costs, 0 to 1").tag(config=True)
    at_most = Float(0.5, help="the largest share that being late may cost, 0 to 1").tag(config=True)
    grace_minutes = Integer(15, help="minutes after the due date that cost nothing").tag(config=True)

    def late_submission_penalty(self, student_id: str, score: float, total_seconds_late: float) -> float | None:
        """Points to take off `score`, or None when there is nothing to take off."""
        if total_seconds_late <= 60 * self.grace_minutes:
            return None
        days = math.ceil(total_seconds_late / DAY)
        return round(score * min(days * self.per_day, self.at_most), 4)
