// Captures whose sources' owner goes on before all has been read.
#include <algorithm>
#include <string>
#include <utility>

#include "capture.hpp"
#include "error.hpp"

namespace zs {
namespace {

// Counts of steps lie between an optimizer's moments, and no optimizer that flips spares them.
constexpr uint64_t kSmall = 4096;

}  // namespace

std::vector<uint8_t> Capture::marks_of(const Spared& spared) const {
  if (spared.left.empty() && spared.kept.empty()) return {};
  std::vector<uint8_t> marks(plan_->pieces());
  const auto mark = [&](uint32_t piece, uint8_t as) {
    if (piece >= marks.size())
      throw Error(Kind::usage, "there is no piece " + std::to_string(piece) + " to spare");
    marks[piece] = as;
  };
  for (const uint32_t piece : spared.left) mark(piece, Sparing::kLeft);
  for (const Kept& kept : spared.kept) mark(kept.piece, Sparing::kKept);
  return marks;
}

// False: the chunk has bytes of others too.
bool Capture::spare(uint64_t chunk, std::span<const uint8_t> marks) {
  if (marks.empty()) return false;
  bool others = false, kept = false, any = false;
  plan_->runs(
      chunk, [](uint64_t, uint64_t) {},
      [&](size_t piece, uint64_t, uint64_t, uint64_t) {
        if (copied(piece) || sources_.place(piece) != Arrays::kHost) return;
        any = true;
        others |= marks[piece] == Sparing::kNot;
        kept |= marks[piece] == Sparing::kKept;
      },
      [](uint64_t, uint64_t) {});
  if (others || !any) return false;
  if (kept)
    parked_.push_back(chunk);
  else
    read_later(chunk);
  released(1);
  return true;
}

Sparing Capture::sparing_of(const Drain& drain, std::span<const uint8_t> marks) const {
  Sparing sparing;
  if (marks.empty()) return sparing;
  drain.training.device->fill(*drain.lane);
  std::vector<std::byte*> elsewhere(plan_->pieces());
  for (const Kept& kept : kept_) elsewhere[kept.piece] = kept.elsewhere;
  const size_t parts = drain.firsts.size();
  sparing.parts.resize(parts);
  for (size_t k = 0; k < parts; ++k) {
    uint8_t mark = Sparing::kLeft;
    const size_t last = k + 1 < parts ? drain.firsts[k + 1] : drain.runs.size();
    for (size_t c = drain.firsts[k]; c < last; ++c) {
      const auto [piece, begin] = drain.runs[c];
      if (copied(piece)) continue;  // from memory of our own
      if (marks[piece] == Sparing::kNot && plan_->size(piece) <= kSmall) {
        sparing.small.push_back(c);
        continue;
      }
      if (marks[piece] == Sparing::kNot) mark = Sparing::kNot;
      if (mark == Sparing::kNot) break;
      if (marks[piece] != Sparing::kKept) continue;
      mark = Sparing::kKept;
      sparing.copies.emplace_back(c, reinterpret_cast<CUdeviceptr>(elsewhere[piece] + begin));
    }
    sparing.parts[k] = mark;
  }
  return sparing;
}

CUstream Capture::stream_of(const Drain& drain, std::span<const Training> trainings) {
  for (const Training& now : trainings)
    if (now.device == drain.training.device) return now.stream;
  return drain.training.stream;
}

void Capture::release(std::span<const Training> trainings) {
  for (const Kept& kept : kept_) sources_.data[kept.piece] = kept.elsewhere;
  kept_.clear();
  for (const uint64_t chunk : parked_) read_later(chunk);
  parked_.clear();
  for (const Drain& drain : drains_) drain.training.device->release(*drain.lane, stream_of(drain, trainings));
}

std::vector<uint32_t> Capture::pending() const {
  std::vector<uint32_t> pieces;
  if (const uint64_t left = unclaimed(); left != 0)
    for (size_t piece = plan_->pieces_in(plan_->chunks() - left).first; piece < plan_->pieces(); ++piece)
      if (!copied(piece) && plan_->size(piece) != 0 && sources_.place(piece) == Arrays::kHost)
        pieces.push_back(static_cast<uint32_t>(piece));
  for (const Drain& drain : drains_)
    for (size_t c = drain.training.device->pending_from(*drain.lane); c < drain.runs.size(); ++c)
      if (!copied(drain.runs[c].piece)) pieces.push_back(drain.runs[c].piece);
  std::sort(pieces.begin(), pieces.end());
  pieces.erase(std::unique(pieces.begin(), pieces.end()), pieces.end());
  return pieces;
}

}  // namespace zs
