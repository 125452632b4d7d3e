// Do dicts and lists of Python still hold the very objects they held? Asked before every capture.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

struct _object;  // PyObject

namespace zs {

// Everything here needs the GIL, the destructor too. Keeps a reference to each container and each item, so
// that no address can come back as another object.
class Watch {
 public:
  // Throws Kind::usage for what is neither a dict nor a list.
  explicit Watch(const std::vector<_object*>& containers);
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;
  ~Watch();

  bool same();
  // Whether no container was written to since renew(), or since the beginning: what it holds is the very
  // same, plain values too. Also false where that cannot be told.
  bool untouched() const;
  void renew();

  // For Python's collector of cycles: every object held, until `visit` returns other than 0; and letting go
  // of all, after which nothing is the same any more.
  int traverse(int (*visit)(_object*, void*), void* argument) const;
  void drop() noexcept;

 private:
  struct Container {
    _object* object;
    bool is_dict;
    size_t end;            // of its items in items_
    uint64_t tag = 0;      // as same() saw it, all items being the same
    uint64_t renewed = 0;  // as renew() saw it
  };

  void hold(_object* item);
  bool same_items(const Container& container, size_t first) const;
  bool same_elements(const Container& container, size_t first) const;
  [[gnu::always_inline]] static inline void fetch_ahead(const Container& container) noexcept;

  bool dropped_ = false;
  std::vector<Container> containers_;
  std::vector<_object*> items_;  // of a dict: key, value, key, value
};

}  // namespace zs
