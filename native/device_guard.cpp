// What a guard does on a device: what is waited for, what is moved aside, what may stay.
#include <algorithm>
#include <utility>
#include <vector>

#include "device.hpp"
#include "error.hpp"

namespace zs {
namespace {

constexpr size_t kTogether = 64;  // parts of a guard's at most, by one call and with one mark

}  // namespace

void Device::look_back(size_t number) {
  Times& times = times_[number];
  if (!times.all) return;
  float free = 0, waited = 0;  // milliseconds
  const cuda::Driver& d = cuda::driver();
  if (d.cuEventElapsedTime(&free, times.saved, times.guarded) != CUDA_SUCCESS) return;
  if (d.cuEventElapsedTime(&waited, times.moves ? times.moved : times.guarded, times.passed) != CUDA_SUCCESS)
    return;
  times.all = false;
  forecast_.guarded(free / 1e3, waited / 1e3);
}

// All parts below `end`, by few calls; smaller and smaller ones, so that checksums are not late for the last.
void Device::queue_up_to(Lane& lane, size_t end) {
  constexpr size_t kShare = 8;
  while (lane.queued < end) queue(lane, std::clamp((end - lane.queued) / kShare, size_t{1}, kTogether));
}

// Has these copies read from memory of the device's own, to which `aside` brings them. False: there is none.
bool Device::move_small(Lane& lane, std::span<const size_t> small, std::vector<cuda::Copy>& aside) {
  constexpr size_t kAligned = 16;
  uint64_t nbytes = 0;
  for (const size_t c : small) nbytes += lane.copies[c].nbytes + kAligned;
  if (nbytes == 0) return true;
  if (!(lane.beside = vram_->lend(nbytes))) return false;
  CUdeviceptr at = lane.beside.at();
  for (const size_t c : small) {
    cuda::Copy& copy = lane.copies[c];
    aside.push_back({at, copy.from, copy.nbytes});
    copy.from = at;
    at += (copy.nbytes + kAligned - 1) / kAligned * kAligned;
  }
  return true;
}

// Brings what is spared at the end of the lane into its order: what is left before what is kept. Says where
// it begins. With mutex_ held.
size_t Device::spare(Lane& lane, const Sparing& sparing, std::vector<cuda::Copy>& aside) {
  size_t end = lane.parts.size();
  if (sparing.parts.empty()) return end;
  while (end > lane.queued && sparing.parts[end - 1] != Sparing::kNot) --end;
  if (end == lane.parts.size()) return end;
  const auto first = std::lower_bound(sparing.small.begin(), sparing.small.end(), lane.parts[end].first);
  if (!move_small(lane, {first, sparing.small.end()}, aside)) return lane.parts.size();
  for (const auto& [copy, from] : sparing.copies)
    if (copy >= lane.parts[end].first) lane.copies[copy].from = from;
  std::vector<Lane::Part> left, kept;
  for (size_t k = end; k < lane.parts.size(); ++k)
    (sparing.parts[k] == Sparing::kKept ? kept : left).push_back(std::move(lane.parts[k]));
  lane.kept_from = end + left.size();
  lane.held = !kept.empty();
  std::move(left.begin(), left.end(), lane.parts.begin() + static_cast<ptrdiff_t>(end));
  std::move(kept.begin(), kept.end(), lane.parts.begin() + static_cast<ptrdiff_t>(lane.kept_from));
  return end;
}

void Device::release(Lane& lane, CUstream training) {
  std::exception_ptr error;
  uint64_t dropped = 0;
  {
    const cuda::Context::Current current(*context_);
    const std::lock_guard lock(mutex_);
    if (!lane.held) return;
    try {
      order(training, copies_, frozen_);
    } catch (const Error&) {
      error = std::current_exception();
      dropped = give_up(lane);
    }
    lane.held = false;
    wake_.notify_one();
  }
  if (error) lane.landing->dropped(dropped, error);
}

void Device::fill(Lane& lane) {
  std::exception_ptr error;
  uint64_t dropped = 0;
  {
    const cuda::Context::Current current(*context_);
    const std::lock_guard lock(mutex_);
    try {
      prepare(lane);
    } catch (const Error&) {
      error = std::current_exception();
      dropped = give_up(lane);
    }
  }
  if (error) lane.landing->dropped(dropped, error);
}

size_t Device::pending_from(Lane& lane) {
  fill(lane);
  const std::lock_guard lock(mutex_);
  const size_t part = std::max<size_t>(lane.queued, std::min<uint64_t>(lane.ahead, lane.parts.size()));
  return lane.released || part >= lane.parts.size() ? lane.copies.size() : lane.parts[part].first;
}

Redirection Device::protect(Lane& lane, CUstream training, uint64_t freeze_bytes, const Sparing& sparing) {
  Redirection result;
  std::exception_ptr error;
  uint64_t dropped = 0;
  CUresult waits = CUDA_SUCCESS;
  {
    const cuda::Context::Current current(*context_);
    const std::lock_guard lock(mutex_);
    if (lane.released || lane.over() || !guarded_) return result;
    Times& times = times_[lane.times];
    refuse_captured(training);
    try {
      prepare(lane);
      look_at_sources(lane);
      if (lane.forecast) ZS_CUDA(cuEventRecord, times.guarded, training);
      if (freeze_bytes != 0 || lane.forecast) {
        // Those that the copy thread has not come to yet but is expected to bring in time.
        queue_up_to(lane, std::min<uint64_t>(lane.ahead, lane.parts.size()));
      }
      result.pending = lane.pending();
      std::vector<cuda::Copy> aside;
      const size_t spared = spare(lane, sparing, aside);
      for (size_t k = spared; k < lane.parts.size(); ++k)
        for (const cuda::Copy& copy : lane.copies_of(lane.parts[k])) result.spared_bytes += copy.nbytes;
      // The last ones are moved aside: those before them are the copy stream's next anyway.
      size_t end = spared;
      for (; end > lane.queued; --end) {
        Lane::Part& part = lane.parts[end - 1];
        uint64_t nbytes = 0;
        for (const cuda::Copy& copy : lane.copies_of(part)) nbytes += copy.nbytes;
        if (nbytes > freeze_bytes - result.frozen_bytes) break;
        if (!(part.frozen = vram_->lend_reserved(nbytes))) break;
        result.frozen_bytes += nbytes;
      }
      queue_up_to(lane, end);
      ZS_CUDA(cuEventRecord, safe_, copies_);
      for (size_t k = end; k < spared; ++k) {
        CUdeviceptr at = lane.parts[k].frozen.at();
        for (size_t c = lane.parts[k].first; c < lane.parts[k].last; ++c) {
          cuda::Copy& copy = lane.copies[c];
          aside.push_back({at, copy.from, copy.nbytes});
          copy.from = at;
          at += copy.nbytes;
        }
      }
      if (!aside.empty()) {
        copy_within_order(training, cuda::Way::within, aside, true);
        order(training, copies_, frozen_);
        if (lane.forecast) ZS_CUDA(cuEventRecord, times.moved, training);
      }
      times.moves = !aside.empty();
    } catch (const Error&) {
      error = std::current_exception();
      dropped = give_up(lane);
      cuda::driver().cuEventRecord(safe_, copies_);
    }
    waits = cuda::driver().cuStreamWaitEvent(training, safe_, CU_EVENT_WAIT_DEFAULT);
    if (lane.forecast && !error)
      times.all = cuda::driver().cuEventRecord(times.passed, training) == CUDA_SUCCESS;
    lane.released = true;
    wake_.notify_one();
  }
  if (error) lane.landing->dropped(dropped, error);
  cuda::check(waits, "cuStreamWaitEvent");
  return result;
}

}  // namespace zs
