"""The order of a study: which stage runs on which model and text, and what becomes of their results."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

from ffncompress import __version__
from ffncompress.profiling.agreement import agreements, learned
from ffncompress.profiling.crossfeed import cross_feed, verdict
from ffncompress.profiling.measure import Linear
from ffncompress.profiling.records import CrossFed, CrossFeed, Profile, Study
from ffncompress.profiling.session import Session
from ffncompress.profiling.stages import StudyStages
from ffncompress.profiling.subjects import Subject, fed, find_subjects
from ffncompress.recovery import LinearFit
from ffncompress.runtime.run import Run
from ffncompress.settings import ProfileSettings
from ffncompress.text.sources import public_name


def make_study(
    models: list[str],
    settings: ProfileSettings,
    stages: StudyStages,
    run: Run,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Study:
    """Measure all that the settings ask for; what an earlier run finished is not done again.

    Raises:
        FfncompressError: a model, a text or the settings do not serve; the message says what would.
    """
    subjects = find_subjects(models, settings, run, revision=revision, trust_remote_code=trust_remote_code)
    for subject in subjects:
        for text in subject.texts:
            subject.corpus(text)  # an unreadable text is said before hours of work
        subject.unload()  # where it was asked how it reads: one model in memory at a time
    stages.records = [Linear, LinearFit]
    profiles, pitfalls = [], []
    for subject in subjects:
        for text in subject.texts:
            session = Session(subject, text, stages)
            profiles.append(session.profile())
            if settings.pitfall and session.looked_at_closely:
                pitfalls.append(session.pitfall(profiles[-1]))
        subject.unload()
    trained = [profile for profile in profiles if not profile.variant]
    return Study(
        ffncompress_version=__version__,
        settings=settings.model_copy(
            update={
                "data": [public_name(text) for text in settings.data],
                "revisions": [Path(step).name for step in settings.revisions],
            }
        ),
        profiles=profiles,
        agreements=agreements(trained),
        pitfalls=pitfalls,
        cross_feeds=_cross_feeds(subjects, profiles, stages) if settings.cross_feed else [],
        learned=learned(profiles),
        stages=stages.times,
    )


def _cross_feeds(subjects: list[Subject], profiles: list[Profile], stages: StudyStages) -> list[CrossFeed]:
    """Every model's FFNs on every other's activations, on the giver's first text."""
    found = []
    for giver, taker in permutations(fed(subjects), 2):
        text = giver.texts[0]
        sessions = [Session(giver, text, stages), Session(taker, taker.texts[0], stages)]
        r2 = [
            next(p.r2 for p in profiles if (p.name, p.text) == (session.subject.name, public_name(session.text)))
            for session in sessions
        ]
        facts = {"giver": sessions[0].facts, "taker": sessions[1].facts}
        name = f"{taker.name} fed {giver.name}'s activations"

        def feed(
            giver: Subject = giver, taker: Subject = taker, sessions: list[Session] = sessions
        ) -> list[tuple[float, float]]:
            return cross_feed(
                giver.model, giver.blocks, sessions[0].linear(), taker.model, taker.blocks, sessions[1].linear(),
                sessions[0].corpus, giver.run,
            )  # fmt: skip

        pairs = stages.timed(name, facts, list[tuple[float, float]], feed)
        blocks = [
            CrossFed(block=i, own=own, raw=raw, matched=matched, giver=given)
            for i, ((raw, matched), own, given) in enumerate(zip(pairs, r2[1], r2[0], strict=False))
        ]
        columns = [[getattr(block, what) for block in blocks] for what in ("own", "raw", "matched", "giver")]
        found.append(
            CrossFeed(
                model=taker.name, giver=giver.name, text=public_name(text), fit_tokens=sessions[0].corpus.fit.numel(),
                held_out_tokens=sessions[0].corpus.choose.numel(), context=giver.settings.seq_len,
                seed=giver.settings.seed, blocks=blocks, verdict=verdict(*columns),
            )
        )  # fmt: skip
    return found
