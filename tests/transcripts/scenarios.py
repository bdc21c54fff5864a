"""The scenarios. Each tells one story; numbers are chosen so that they can be followed in one's head."""

from __future__ import annotations

from collections.abc import Callable

from anabranch.orchestrator.core import events as ev
from anabranch.orchestrator.core import instructions as do
from anabranch.queue import messages as msg
from tests.orchestrator.bench import claim, digest, make_spec, one, restored
from tests.transcripts.stage import Stage


def join() -> Stage:
    stage = Stage(
        "Joining",
        "A run begins with its first worker: it is let in, gives version 0, and trains. Others join. H = 4, P = 2, "
        "one answer is enough (rounds.quorum = 1).",
        make_spec(),
        sizes=(30, 10),
        born=False,
    )
    stage.act("The first worker is let in. There is no model yet; this worker has one and is asked for it.")
    stage.join("ann", can_init=True, label="a laptop")
    stage.elapse(0.25)
    entry = stage.entry()
    stage.say("ann", msg.Init(incarnation=1, layout=claim("ann"), fragments=claim("ann", b"f" * 32)), entry)
    stage.act("Its version 0 was fetched and verified: the run is born.")
    stage.elapse(0.125)
    stage.send(ev.InitReady(1, "layout", (30, 10), (digest(0, 0), digest(1, 0)), entry))
    stage.enter("ann", 1)
    stage.act(
        "A second worker joins. One with another model cannot, nor a second process under a name that is in use."
    )
    stage.join("bob", layout_hash="layout")
    stage.join("mallory", layout_hash="another")
    stage.join("ann", life=2)
    stage.act("Both train. Ann reports H/P = 2 steps more than at first: a round is due.")
    stage.steps(ann=1, bob=1)
    stage.steps(ann=2, bob=2)
    stage.act("Both answer the call. Nobody is missing, so the two are merged at once.")
    stage.contribute("ann")
    order = one(do.Merge, stage.contribute("bob"))
    stage.elapse(0.125)
    stage.merge(order)
    return stage


def quorum_and_grace() -> Stage:
    stage = Stage(
        "Quorum and grace",
        "Two answers are enough (rounds.quorum = 2). Once they are there, a round waits for the others as long as "
        "that costs nobody time: the grace window. H = 8, P = 1.",
        make_spec(quorum=2, fragments=1, inner_steps=8),
        sizes=(10,),
    )
    for name in ("ann", "bob", "cid"):
        stage.worker(name)

    def train() -> None:
        """Eight steps, reported twice."""
        stage.steps(ann=7, bob=7, cid=7)
        stage.steps(ann=1, bob=1, cid=1)

    stage.act(
        "Three workers train. As two are needed, the second fastest paces: bob's eighth step makes a round due."
    )
    train()
    stage.act("One answer is below the quorum. The second is the quorum, and opens the grace window.")
    stage.contribute("ann")
    stage.elapse(0.25)
    stage.contribute("bob")
    stage.act("The third comes within the window. Nobody is missing any more: all three are merged.")
    stage.elapse(0.125)
    order = one(do.Merge, stage.contribute("cid"))
    stage.elapse(0.125)
    stage.merge(order)
    stage.elapse(0.5)
    stage.act("In the next round cid does not come: the window ends without it.")
    train()
    stage.contribute("ann")
    stage.contribute("bob")
    order = one(do.Merge, stage.elapse(1.0))
    stage.merge(order)
    stage.elapse(0.5)
    stage.act(
        "A third round. Only ann answers: below the quorum nothing is merged, and at the deadline it is given up."
    )
    train()
    stage.contribute("ann")
    stage.elapse(10.0)
    stage.act(
        "The base still stands, so ann's answer stays in hand: in the next round on it, bob's makes the quorum."
    )
    train()
    stage.contribute("bob")
    order = one(do.Merge, stage.contribute("cid"))
    stage.merge(order)
    return stage


def late_work() -> Stage:
    stage = Stage(
        "Late work",
        "Every contribution gets exactly one outcome, and its tokens are booked once, however late or often it "
        "comes. One answer is enough here (rounds.quorum = 1). H = 4, P = 1.",
        make_spec("overwrite", fragments=1),
        sizes=(10,),
    )
    workers = {"ann": 4, "bob": 4, "cid": 4, "dan": 4}
    for name in workers:
        stage.worker(name)
    stage.act("A round is due, and all four are called.")
    stage.steps(**workers)
    stage.act(
        "Ann's answer is the quorum. Dan's is not finite: it is refused, but booked only when its base is "
        "superseded, for a better one may still come."
    )
    stage.contribute("ann")
    broken = stage.offer("dan")
    stage.send_offer(broken)
    stage.fetch_failed(broken, "tensor 0 is not finite")
    stage.act(
        "The window ends without bob and cid. Bob's answer arrives while the merge is computed: too late for it."
    )
    order = one(do.Merge, stage.elapse(0.5))
    stage.contribute("bob")
    stage.elapse(0.125)
    stage.act("The commit supersedes the base, and books everything that is here and was based on it.")
    stage.merge(order)
    stage.act("Cid's answer comes after the commit: late. It is booked when it is read.")
    stage.elapse(0.125)
    late = stage.offer("cid", base=0, round=1, tokens=500)
    stage.send_offer(late)
    stage.act("Cid heard no answer and sends it once more: the same answer again, and nothing is booked.")
    stage.elapse(0.125)
    stage.send_offer(ev.Offer("cid", stage.entry(), late.message))
    stage.act("Something on a base that the run has not reached cannot be placed at all.")
    stage.contribute("dan", base=7, tokens=100)
    return stage


def death() -> Stage:
    stage = Stage(
        "Death",
        "A worker that is silent for 2.5 heartbeats is gone: nobody waits for it, and what it did not send is lost. "
        "Its books are closed once everything it sent has its outcome. H = 4, P = 2, rounds.quorum = 2.",
        make_spec(quorum=2),
        sizes=(10, 10),
    )
    for name in ("ann", "bob", "cid"):
        stage.worker(name)
    stage.act("A round is open. Ann and bob answer; cid is killed, without a word. The window ends without it.")
    stage.steps(ann=2, bob=2, cid=2)
    stage.puppets["cid"].silent = True
    stage.contribute("ann")
    stage.contribute("bob")
    stage.merge(one(do.Merge, stage.elapse(0.5)))
    stage.act(
        "Cid stays silent. A sweep finds that its time is over. It had sent nothing, so its books are closed at "
        "once: the 300 tokens that it had trained, on both fragments, are lost."
    )
    stage.elapse(2.5)
    stage.act("Cid had only been asleep. Whoever speaks for an incarnation that is over is told so.")
    stage.puppets["cid"].silent = False
    stage.elapse(0.5)
    stage.act("So it registers anew and gets another incarnation.")
    stage.join("cid", life=2)
    stage.act(
        "Bob is killed just after it has answered a call. Its answer stays valid: ann's makes the quorum with it, "
        "and only then bob's books are closed. The 200 tokens on the other fragment are lost."
    )
    stage.steps(ann=1, bob=1)
    stage.steps(ann=1, bob=1)
    stage.contribute("bob", 1)
    stage.puppets["bob"].silent = True
    stage.elapse(3.0)
    stage.merge(one(do.Merge, stage.contribute("ann", 1)))
    stage.elapse(0.5)
    return stage


def roll_back() -> Stage:
    stage = Stage(
        "Roll-back",
        "The server crashes and comes back with less than it had acknowledged. Version 1 of the fragment would then "
        "stand for two different things, so the run goes on under a new timeline. H = 4, P = 1, rounds.quorum = 1.",
        make_spec(fragments=1),
        sizes=(10,),
    )
    stage.worker("ann")
    stage.worker("bob")
    stage.steps(ann=4, bob=4)
    stage.act("Round 1 is merged from ann's answer alone, and ann is at v1. The server had written its file before.")
    offer = stage.offer("ann")
    stage.send_offer(offer)
    stage.fetched(offer)
    order = one(do.Merge, stage.elapse(0.5))
    state, broadcast = restored(stage.state, stage.now, stage.engine.broadcast), stage.engine.broadcast
    stage.commit(order)
    stage.adopt(stage.puppets["ann"], 0, 1, settled=500)
    stage.act(
        "The server comes back from its file: the fragment is at v0 there, round 1 is open, and ann's answer is in "
        "its inbox. The next leader loads that, and reads the inbox."
    )
    stage.engine.broadcast = broadcast
    stage.engine.succeed(state)
    stage.send_offer(offer)
    stage.fetched(offer)
    stage.act(
        "A heartbeat of ann's gives it away: it holds a version that this run never had. A new timeline begins."
    )
    stage.elapse(0.3125)
    stage.act("Ann reads that its version is gone for good: it leaves, and joins again as somebody new.")
    stage.leave("ann", "a new timeline does not have what fragment 0 is based on")
    stage.join("ann", life=2)
    stage.act(
        "Bob was at v0 all the time, and so is the run: it keeps its work. Its steps make a round due on the new "
        "timeline, with numbers far from those that are lost. What ann had sent on v0 is in hand already."
    )
    stage.puppets["bob"].timeline = stage.state.timeline
    stage.steps(bob=1)
    stage.steps(bob=4)
    stage.act("Bob's answer completes it, and there is a v1 again: another one than the v1 that is lost.")
    stage.merge(one(do.Merge, stage.contribute("bob")))
    stage.act("The incarnation that ann had before has all its outcomes: its books are closed.")
    stage.elapse(0.5)
    return stage


SCENARIOS: dict[str, Callable[[], Stage]] = {
    "join": join,
    "quorum_and_grace": quorum_and_grace,
    "late_work": late_work,
    "death": death,
    "roll_back": roll_back,
}
