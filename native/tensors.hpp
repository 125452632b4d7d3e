// Tensors and arrays of Python: where they lie now, and whether they are still what they were.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "capture.hpp"
#include "dlpack.hpp"
#include "imprint.hpp"

struct _object;  // PyObject

namespace zs {

// Everything here needs the GIL, the destructor too. A torch tensor is asked through DLPack's C exchange API
// (40 ns, and 35 for the version) when its imprint has changed (20 ns); where torch has none or it refuses
// (an unknown dtype), and for numpy arrays, by method calls (about 1 us).
class Tensors {
 public:
  // Keeps a reference to each. `tracked`: those whose version counter is watched. Throws Kind::usage and
  // names the index where something cannot be described. With `exchange` false, method calls only.
  Tensors(const std::vector<_object*>& objects, const std::vector<bool>& tracked, bool exchange = true);
  Tensors(const Tensors&) = delete;
  Tensors& operator=(const Tensors&) = delete;
  ~Tensors();

  std::vector<uint32_t> refresh();  // indexes that no longer fit what the constructor saw
  // Tracked ones whose version is not what refresh() saw; with `exchanges`, and before let_go(), also those
  // whose storage of then has other memory now.
  std::vector<uint32_t> moved(bool exchanges) const;
  bool any_within(const std::byte* begin, size_t nbytes) const;  // as refresh() saw them
  std::vector<uint64_t> pointers() const;
  size_t size() const { return entries_.size(); }
  size_t imprinted() const;  // of how many it is told from their bytes whether they have changed
  std::vector<const void*> blocks() const;  // what refresh() reads of those with an imprint
  std::vector<int> devices() const;         // numbers of the CUDA devices that hold some, rising

  // Memory that a tensor has left (`parameter.data = other`, `module.to(...)`) is held until the refresh()
  // after, so that it is neither unmapped nor given to somebody else while it is read: all memory of a
  // device, and in host memory that of tracked tensors. This lets go of such memory; call it when nothing
  // reads.
  // A storage's memory can also be exchanged in place, behind the storage (`share_memory_`, `resize_`): that
  // cannot be held, but moved() tells.
  void let_go() noexcept;

  // As refresh() saw them. Throws where it found a misfit, where memory is neither the host's nor a CUDA
  // device's, or is read-only.
  Arrays sources(std::vector<std::byte*> room = {}) const;  // `room`: where the addresses may lie
  Arrays targets() const;

 private:
  // What refresh() goes through: one line of memory each.
  struct alignas(kLine) Entry {
    _object* object = nullptr;
    Imprint imprint;
    bool tracked = false, leaves = false;  // leaves: it may leave its memory while that is read
  };
  static_assert(sizeof(Entry) == kLine);
  // What it takes to ask torch anew.
  struct Facts {
    const dlpack::ExchangeApi* api = nullptr;  // null: asked by method calls
    dlpack::Device device{};
    dlpack::Type type{};
    uint32_t ndim = 0;
    size_t extent = 0;         // into extents_: the shape, then the strides in the producer's unit
    _object* dtype = nullptr;  // of those asked by method calls
    _object* place = nullptr;  // their torch.device
    // Of one that leaves, as refresh() saw it: a twin that shares storage and counter, or only the storage.
    _object* held = nullptr;
    const std::byte* held_at = nullptr;  // the tensor's memory then, and
    const std::byte* begins = nullptr;   // the storage's
  };
  struct Answer;  // of a tensor asked by method calls

  static Answer ask(_object* object);
  Geometry describe(size_t index, bool exchange, int16_t& place);
  bool ask_anew(size_t index);
  // Where the tensor lies now, and where torch keeps its shape (null: nowhere). False: something has changed.
  bool look(size_t index, std::byte*& data, const int64_t*& shape) const;
  bool look_by_calls(size_t index, std::byte*& data) const;
  void remember(Facts& facts, const int64_t* shape, const int64_t* strides);
  void hold(size_t index);
  bool hold_twin(size_t index);
  bool moved_alone(size_t index, bool exchanges) const;
  bool exchanged(size_t index) const;
  Arrays arrays(std::vector<std::byte*> room) const;
  void drop() noexcept;

  std::vector<Entry> entries_;
  std::vector<int64_t> versions_;    // as refresh() saw them; 0 of what is not tracked
  std::vector<Imprint::Kept> kept_;  // what moved() goes through: by what is held of the tensors
  std::vector<Facts> facts_;
  std::vector<int64_t> extents_;
  std::vector<std::byte*> data_;
  std::shared_ptr<const std::vector<Geometry>> geometries_;
  std::shared_ptr<const std::vector<int16_t>> places_;  // null: all in host memory
  std::vector<uint32_t> misfits_;
  std::optional<size_t> elsewhere_, read_only_;  // the first in memory that cannot be reached, or read-only
};

}  // namespace zs
