/* The Python module kvstate._core: checks and converts, then calls the index.
 *
 * kvstate/_core.pyi describes the interface; tests/oracles/plain_core.py does the same in Python.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <math.h>

#include "changes.h"
#include "persist.h"
#include "scan.h"
#include "wire.h"

/* The feed rejects longer payloads before they get here. */
#define MAX_FAST_PAYLOAD (8u << 20)

/* The first version of Python whose tuples keep their hash, which a plain allocation would leave at
 * 0. Before it, the plain allocation is right, and three times faster. */
#ifndef HASHED_TUPLES
#define HASHED_TUPLES 0x030E0000
#endif

/* The largest piece of a store applied at once; it has at least one block, however large. */
#define PIECE_TOKENS 16384u
#define PIECE_BLOCKS 1024u

/* One message while it is applied. */
typedef struct {
    WireBatch batch;
    Py_buffer view;   /* the payload; its obj is NULL if there is none */
    PyObject *faults; /* a list of names */
    bool parsed, clears;
    bool may_repeat; /* the blocks of the present event may only be announced again */
    size_t done;     /* events */
    uint32_t offset; /* blocks of the next event that are done */
} Message;

typedef struct {
    PyObject_HEAD
    Index index;
    LookupSpace space;
    Message message; /* the present one; its arrays are reused */
    Changes changes; /* of the last message */
    Buffer records;  /* of changes, for other processes */
    PyTypeObject *overlap;
    newfunc new_tuple; /* the constructor of tuples; NULL if they are nothing but their items */
} Core;

/* Returns a constant with a reference taken at run time. Py_RETURN_NONE and the like take none if
 * the headers are of CPython 3.12 or later, where constants are immortal; in 3.11 they are not. */
static PyObject *constant(PyObject *object) {
    Py_IncRef(object);
    return object;
}

static Owner *owner_of(Core *self, PyObject *number) {
    size_t at = PyLong_AsSize_t(number);
    if (at == (size_t)-1 && PyErr_Occurred()) return NULL;
    if (at >= self->index.owner_count || !self->index.owners[at].present) {
        PyErr_SetString(PyExc_ValueError, "no such owner");
        return NULL;
    }
    return &self->index.owners[at];
}

static uint32_t number_of(Core *self, const Owner *owner) {
    return (uint32_t)(owner - self->index.owners);
}

static bool arguments_are(Py_ssize_t given, Py_ssize_t wanted) {
    if (given == wanted) return true;
    PyErr_Format(PyExc_TypeError, "wants %zd arguments, got %zd", wanted, given);
    return false;
}

/* Converts an engine hash, int or bytes, to the number that stands for it. */
static bool hash_of(Core *self, PyObject *object, uint64_t *hash) {
    if (PyBytes_Check(object)) {
        char *bytes;
        Py_ssize_t length;
        if (PyBytes_AsStringAndSize(object, &bytes, &length)) return false;
        *hash = wire_fold_hash(&self->index, (const unsigned char *)bytes, (size_t)length);
        return true;
    }
    *hash = PyLong_AsUnsignedLongLongMask(object);
    return !PyErr_Occurred();
}

/* Converts an adapter: None, its name, or its number. */
static bool lora_of(Core *self, PyObject *object, uint64_t *lora) {
    *lora = 0;
    if (object == Py_None) return true;
    if (PyUnicode_Check(object)) {
        Py_ssize_t length;
        const char *name = PyUnicode_AsUTF8AndSize(object, &length);
        if (!name) return false;
        *lora = wire_lora(&self->index, (const unsigned char *)name, (size_t)length);
        return true;
    }
    uint64_t number = PyLong_AsUnsignedLongLongMask(object);
    if (PyErr_Occurred()) return false;
    unsigned char bytes[sizeof number];
    memcpy(bytes, &number, sizeof number);
    *lora = mix64(~index_hash_bytes(&self->index, bytes, sizeof bytes)) | 1;
    return true;
}

/* Converts a block's extra keys: None, or bytes. */
static bool extra_of(Core *self, PyObject *object, uint64_t *extra) {
    *extra = 0;
    if (object == Py_None) return true;
    char *bytes;
    Py_ssize_t length;
    if (PyBytes_AsStringAndSize(object, &bytes, &length)) return false;
    *extra = index_hash_bytes(&self->index, (const unsigned char *)bytes, (size_t)length);
    return true;
}

static bool group_of(PyObject *object, int64_t *group) {
    *group = object == Py_None ? NO_GROUP : PyLong_AsLongLong(object);
    return !PyErr_Occurred();
}

static bool place_of(PyObject *medium, PyObject *group, PoolName *pool) {
    Py_ssize_t length;
    const char *name = PyUnicode_AsUTF8AndSize(medium, &length);
    if (!name) return false;
    if (!wire_medium((const unsigned char *)name, (size_t)length, &pool->medium, &pool->tier)) {
        PyErr_SetString(PyExc_ValueError, "events of unknown media never reach the index");
        return false;
    }
    return group_of(group, &pool->group);
}

/* Gets a buffer of uint32, which the caller releases. */
static bool tokens_of(PyObject *object, Py_buffer *view) {
    if (PyObject_GetBuffer(object, view, PyBUF_ND | PyBUF_FORMAT)) return false;
    bool aligned = !view->len || (uintptr_t)view->buf % sizeof(uint32_t) == 0;
    if (view->itemsize == 4 && view->len % 4 == 0 && aligned) return true;
    PyBuffer_Release(view);
    PyErr_SetString(PyExc_TypeError, "tokens must be an aligned buffer of uint32");
    return false;
}

static PyObject *core_new(PyTypeObject *type, PyObject *arguments, PyObject *Py_UNUSED(named)) {
    unsigned long long secret;
    Py_ssize_t limit_blocks;
    PyObject *overlap;
    if (!PyArg_ParseTuple(arguments, "KnO!", &secret, &limit_blocks, &PyType_Type, &overlap))
        return NULL;
    if (!PyType_IsSubtype((PyTypeObject *)overlap, &PyTuple_Type)) {
        PyErr_SetString(PyExc_TypeError, "overlaps must be tuples");
        return NULL;
    }
    Core *self = (Core *)PyType_GenericAlloc(type, 0);
    if (!self) return NULL;
    if (!index_init(&self->index, secret, (size_t)limit_blocks)) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    Py_INCREF(overlap);
    self->overlap = (PyTypeObject *)overlap;
    if (Py_Version >= HASHED_TUPLES)
        self->new_tuple = (newfunc)PyType_GetSlot(&PyTuple_Type, Py_tp_new);
    return (PyObject *)self;
}

/* Ends a message, done or not; its arrays stay. */
static void message_end(Message *message) {
    if (message->view.obj) PyBuffer_Release(&message->view);
    Py_CLEAR(message->faults);
}

/* Drops the partly applied message of an owner. */
static void abandon(Owner *owner) {
    Message *message = owner->pending;
    if (!message) return;
    owner->pending = NULL;
    message_end(message);
    wire_free(&message->batch);
    PyMem_Free(message);
}

static void core_dealloc(Core *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    for (uint32_t n = 0; n < self->index.owner_count; n++) abandon(&self->index.owners[n]);
    index_free(&self->index);
    lookup_free(&self->space);
    wire_free(&self->message.batch);
    free(self->changes.buffer.bytes);
    free(self->records.bytes);
    Py_XDECREF((PyObject *)self->overlap);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyObject *core_add_model(Core *self, PyObject *seed) {
    uint64_t hash;
    if (!extra_of(self, seed, &hash)) return NULL;
    uint32_t model = index_add_model(&self->index, hash);
    return model == UINT32_MAX ? PyErr_NoMemory() : PyLong_FromUnsignedLong(model);
}

static PyObject *core_add_owner(Core *self, PyObject *const *arguments, Py_ssize_t count) {
    if (!arguments_are(count, 3)) return NULL;
    unsigned long worker = PyLong_AsUnsignedLong(arguments[0]);
    unsigned long model = PyLong_AsUnsignedLong(arguments[1]);
    unsigned long rank = PyLong_AsUnsignedLong(arguments[2]);
    if (PyErr_Occurred()) return NULL;
    if (model >= self->index.model_count || worker > 1u << 24 || rank > 1u << 24) {
        PyErr_SetString(PyExc_ValueError, "no such model, or a number is too large");
        return NULL;
    }
    uint32_t owner =
        index_add_owner(&self->index, (uint32_t)worker, (uint32_t)model, (uint32_t)rank);
    return owner == UINT32_MAX ? PyErr_NoMemory() : PyLong_FromUnsignedLong(owner);
}

static PyObject *core_limit(Core *self, PyObject *const *arguments, Py_ssize_t count) {
    if (!arguments_are(count, 2)) return NULL;
    Owner *owner = owner_of(self, arguments[0]);
    if (!owner) return NULL;
    size_t blocks = PyLong_AsSize_t(arguments[1]);
    if (PyErr_Occurred()) return NULL;
    owner->limit_blocks = blocks;
    return constant(Py_None);
}

static PyObject *core_remove_owner(Core *self, PyObject *number) {
    Owner *owner = owner_of(self, number);
    if (!owner) return NULL;
    abandon(owner);
    index_remove_owner(&self->index, number_of(self, owner));
    return constant(Py_None);
}

/* Clears or demotes until the limit of work; returns whether all is done. */
static PyObject *go_on(Core *self, PyObject *number, uint64_t work,
                       IndexResult (*some)(Index *, uint32_t)) {
    Owner *owner = owner_of(self, number);
    if (!owner) return NULL;
    index_begin(&self->index, work);
    IndexResult result = some(&self->index, number_of(self, owner));
    if (result == INDEX_NO_MEMORY) return PyErr_NoMemory();
    return PyBool_FromLong(result == INDEX_OK);
}

static PyObject *nothing(PyObject *answer) {
    if (!answer) return NULL;
    Py_DECREF(answer);
    return constant(Py_None);
}

static PyObject *core_clear(Core *self, PyObject *number) {
    return nothing(go_on(self, number, UINT64_MAX, index_clear_some));
}

static PyObject *core_demote(Core *self, PyObject *number) {
    return nothing(go_on(self, number, UINT64_MAX, index_demote_some));
}

/* Reads how much work may be done at once. */
static bool work_of(PyObject *object, uint64_t *work) {
    *work = PyLong_AsUnsignedLongLong(object);
    return !PyErr_Occurred();
}

static PyObject *core_clear_some(Core *self, PyObject *const *given, Py_ssize_t count) {
    uint64_t work;
    if (!arguments_are(count, 2) || !work_of(given[1], &work)) return NULL;
    return go_on(self, given[0], work, index_clear_some);
}

static PyObject *core_demote_some(Core *self, PyObject *const *given, Py_ssize_t count) {
    uint64_t work;
    if (!arguments_are(count, 2) || !work_of(given[1], &work)) return NULL;
    return go_on(self, given[0], work, index_demote_some);
}

static PyObject *core_trust(Core *self, PyObject *const *arguments, Py_ssize_t count) {
    if (!arguments_are(count, 2)) return NULL;
    Owner *owner = owner_of(self, arguments[0]);
    int trusted = PyObject_IsTrue(arguments[1]);
    if (!owner || trusted < 0) return NULL;
    owner->trusted = trusted;
    return constant(Py_None);
}

/* Converts the hashes and extras of a store; both are in `memory`, which the caller frees. */
static bool blocks_of(Core *self, PyObject *hashes, PyObject *extras, Stored *stored,
                      uint64_t **memory) {
    Py_ssize_t count = PyList_Size(hashes);
    if (count < 0) return false;
    if (extras != Py_None && PyList_Size(extras) != count) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "one extra for each hash");
        return false;
    }
    *memory = PyMem_Malloc((2 * (size_t)count + 1) * sizeof **memory);
    if (!*memory) return PyErr_NoMemory(), false;
    for (Py_ssize_t n = 0; n < count; n++) {
        if (!hash_of(self, PyList_GetItem(hashes, n), &(*memory)[n])) return false;
        if (extras != Py_None && !extra_of(self, PyList_GetItem(extras, n), &(*memory)[count + n]))
            return false;
    }
    stored->hashes = *memory;
    stored->extras = extras == Py_None ? NULL : *memory + count;
    stored->count = (uint32_t)count;
    return true;
}

static PyObject *store(Core *self, uint32_t owner, Stored *stored, PyObject *tokens) {
    Py_buffer view;
    if (!tokens_of(tokens, &view)) return NULL;
    uint64_t needed = (uint64_t)stored->count * stored->pool.block_size * 4;
    IndexResult result = INDEX_NO_MEMORY;
    bool sound = stored->pool.block_size && stored->pool.block_size <= MAX_BLOCK_SIZE &&
                 needed == (uint64_t)view.len;
    if (sound) {
        stored->tokens = view.buf;
        result = index_store(&self->index, owner, stored);
    }
    PyBuffer_Release(&view);
    if (!sound) {
        PyErr_SetString(PyExc_ValueError, "tokens must be as many as the blocks hold");
        return NULL;
    }
    return result == INDEX_NO_MEMORY ? PyErr_NoMemory() : PyLong_FromLong(result);
}

static PyObject *core_store(Core *self, PyObject *const *given, Py_ssize_t count) {
    if (!arguments_are(count, 10)) return NULL;
    Owner *owner = owner_of(self, given[0]);
    int may_repeat = PyObject_IsTrue(given[9]);
    if (may_repeat < 0) return NULL;
    Stored stored = {.has_parent = given[2] != Py_None, .may_repeat = may_repeat};
    uint64_t *memory = NULL;
    PyObject *answer = NULL;
    if (!owner || (stored.has_parent && !hash_of(self, given[2], &stored.parent))) return NULL;
    stored.pool.block_size = (uint32_t)PyLong_AsUnsignedLong(given[4]);
    if (!PyErr_Occurred() && lora_of(self, given[5], &stored.lora) &&
        place_of(given[7], given[8], &stored.pool) &&
        blocks_of(self, given[1], given[6], &stored, &memory))
        answer = store(self, number_of(self, owner), &stored, given[3]);
    PyMem_Free(memory);
    return answer;
}

static PyObject *core_remove(Core *self, PyObject *const *given, Py_ssize_t count) {
    if (count != 4 && !arguments_are(count, 5)) return NULL;
    Owner *owner = owner_of(self, given[0]);
    PoolName pool;
    uint64_t hash, left = NOT_TOLD;
    if (!owner || !hash_of(self, given[1], &hash) || !place_of(given[2], given[3], &pool))
        return NULL;
    if (count == 5 && given[4] != Py_None) left = PyLong_AsUnsignedLongLong(given[4]);
    if (PyErr_Occurred()) return NULL;
    bool held = index_remove(&self->index, number_of(self, owner), pool.medium, pool.group, hash,
                             left > NOT_TOLD ? MAX_COPIES : (uint32_t)left);
    return PyBool_FromLong(held);
}

static PyObject *core_copy(Core *self, PyObject *const *given, Py_ssize_t count) {
    if (!arguments_are(count, 4)) return NULL;
    Owner *owner = owner_of(self, given[0]);
    Stored stored = {0};
    uint64_t *memory = NULL;
    IndexResult result = INDEX_NO_MEMORY;
    bool sound = owner && place_of(given[2], given[3], &stored.pool) &&
                 blocks_of(self, given[1], Py_None, &stored, &memory);
    if (sound)
        result = index_copy(&self->index, number_of(self, owner), &stored.pool, stored.hashes,
                            stored.count);
    PyMem_Free(memory);
    if (!sound) return NULL;
    if (result == INDEX_NO_MEMORY) return PyErr_NoMemory();
    return constant(Py_None);
}

static PyObject *core_lend(Core *self, PyObject *const *given, Py_ssize_t count) {
    if (!arguments_are(count, 5)) return NULL;
    Owner *owner = owner_of(self, given[0]), *lender = owner ? owner_of(self, given[1]) : NULL;
    if (!lender) return NULL;
    if (owner->model != lender->model) {
        PyErr_SetString(PyExc_ValueError, "owners of different models");
        return NULL;
    }
    Stored stored = {0};
    uint64_t *memory = NULL;
    IndexResult result = INDEX_NO_MEMORY;
    uint32_t lent = 0;
    bool sound = place_of(given[3], given[4], &stored.pool) &&
                 blocks_of(self, given[2], Py_None, &stored, &memory);
    if (sound)
        result = index_lend(&self->index, number_of(self, owner), number_of(self, lender),
                            &stored.pool, stored.hashes, stored.count, &lent);
    PyMem_Free(memory);
    if (!sound) return NULL;
    if (result == INDEX_NO_MEMORY) return PyErr_NoMemory();
    return PyLong_FromUnsignedLong(lent);
}

/* holds_prefix: None, True or False */
static bool kind_of(PyObject *holds_prefix, GroupKind *kind) {
    int truth = PyObject_IsTrue(holds_prefix);
    *kind = holds_prefix == Py_None ? KIND_UNNAMED : truth ? KIND_PREFIX : KIND_OTHER;
    return truth >= 0;
}

static PyObject *core_admit(Core *self, PyObject *const *given, Py_ssize_t count) {
    if (!arguments_are(count, 3)) return NULL;
    Owner *owner = owner_of(self, given[0]);
    int64_t group;
    GroupKind kind;
    if (!owner || !group_of(given[1], &group) || !kind_of(given[2], &kind)) return NULL;
    return PyLong_FromLong(groups_stored(&owner->groups, group, kind));
}

static PyObject *core_admission(Core *self, PyObject *const *given, Py_ssize_t count) {
    if (!arguments_are(count, 2)) return NULL;
    const Owner *owner = owner_of(self, given[0]);
    int64_t group;
    if (!owner || !group_of(given[1], &group)) return NULL;
    return PyLong_FromLong(groups_admission(&owner->groups, group));
}

/* The block size and reach of a group, each 0 for None. */
static bool size_of(PyObject *object, uint32_t *size) {
    unsigned long value = object == Py_None ? 0 : PyLong_AsUnsignedLong(object);
    if (!PyErr_Occurred() && value > MAX_WINDOW)
        PyErr_SetString(PyExc_ValueError, "more tokens than a window has");
    *size = (uint32_t)value;
    return !PyErr_Occurred();
}

static PyObject *core_note_group(Core *self, PyObject *const *given, Py_ssize_t count) {
    if (!arguments_are(count, 4)) return NULL;
    Owner *owner = owner_of(self, given[0]);
    int64_t group;
    uint32_t block_size, reach;
    if (!owner || !group_of(given[1], &group) || !size_of(given[2], &block_size) ||
        !size_of(given[3], &reach))
        return NULL;
    index_begin(&self->index, UINT64_MAX);
    IndexResult noted = ends_note(&self->index, number_of(self, owner), group, block_size, reach);
    return noted == INDEX_NO_MEMORY ? PyErr_NoMemory() : constant(Py_None);
}

static PyObject *core_store_ends(Core *self, PyObject *const *given, Py_ssize_t count) {
    if (!arguments_are(count, 4)) return NULL;
    Owner *owner = owner_of(self, given[0]);
    int64_t group;
    uint64_t *memory = NULL;
    Stored stored = {0};
    IndexResult result = INDEX_OK;
    int may_repeat = PyObject_IsTrue(given[3]);
    bool sound = owner && may_repeat >= 0 && group_of(given[2], &group) &&
                 blocks_of(self, given[1], Py_None, &stored, &memory);
    for (uint32_t n = 0; sound && n < stored.count && result == INDEX_OK; n++)
        result = ends_store(&self->index, number_of(self, owner), group, memory[n], may_repeat);
    PyMem_Free(memory);
    if (!sound) return NULL;
    if (result == INDEX_OVER_LIMIT) owner->over_limit++;
    return result == INDEX_NO_MEMORY ? PyErr_NoMemory() : constant(Py_None);
}

static PyObject *core_remove_end(Core *self, PyObject *const *given, Py_ssize_t count) {
    if (!arguments_are(count, 4)) return NULL;
    Owner *owner = owner_of(self, given[0]);
    int64_t group;
    uint64_t hash, left = NOT_TOLD;
    if (!owner || !hash_of(self, given[1], &hash) || !group_of(given[2], &group)) return NULL;
    if (given[3] != Py_None) left = PyLong_AsUnsignedLongLong(given[3]);
    if (PyErr_Occurred()) return NULL;
    ends_remove(&self->index, number_of(self, owner), group, hash,
                left > NOT_TOLD ? NOT_TOLD - 1 : (uint32_t)left);
    return constant(Py_None);
}

static PyObject *core_begin_message(Core *self, PyObject *number) {
    Owner *owner = owner_of(self, number);
    if (!owner) return NULL;
    self->changes.is_whole = false;
    if (owner->ends) owner->ends->message = (owner->ends->message + 1) & END_MESSAGES;
    return constant(Py_None);
}

static PyObject *core_may_reuse(Core *self, PyObject *const *given, Py_ssize_t count) {
    if (!arguments_are(count, 3)) return NULL;
    Owner *owner = owner_of(self, given[0]);
    uint64_t *memory = NULL;
    uint32_t block_size;
    Stored stored = {0};
    bool sound = owner && size_of(given[2], &block_size) &&
                 blocks_of(self, given[1], Py_None, &stored, &memory);
    bool may = sound && ends_may_reuse(&self->index, number_of(self, owner), memory, stored.count,
                                       block_size ? block_size : 1);
    PyMem_Free(memory);
    return sound ? PyBool_FromLong(may) : NULL;
}

static PyObject *core_announce_copies(Core *self, PyObject *number) {
    Owner *owner = owner_of(self, number);
    if (!owner) return NULL;
    index_announce_copies(owner);
    return constant(Py_None);
}

static PyObject *core_drop_last(Core *self, PyObject *const *given, Py_ssize_t count) {
    if (!arguments_are(count, 2)) return NULL;
    Owner *owner = owner_of(self, given[0]);
    unsigned long blocks = owner ? PyLong_AsUnsignedLong(given[1]) : 0;
    if (!owner || PyErr_Occurred()) return NULL;
    owner->last_drop = (uint32_t)blocks;
    index_note_cut(&self->index, number_of(self, owner));
    return constant(Py_None);
}

/* (ends, whether they show exactly where a prefix can be reused, ((block size, need), ...)) */
static PyObject *core_other_groups(Core *self, PyObject *number) {
    const Owner *owner = owner_of(self, number);
    if (!owner) return NULL;
    const Ends *ends = owner->ends;
    PyObject *classes = PyTuple_New(ends ? (Py_ssize_t)ends->class_count : 0);
    for (uint32_t n = 0; classes && ends && n < ends->class_count; n++) {
        PyObject *made = Py_BuildValue("(II)", ends->classes[n].block_size, ends->classes[n].need);
        if (!made || PyTuple_SetItem(classes, (Py_ssize_t)n, made)) Py_CLEAR(classes);
    }
    if (!classes) return NULL;
    return Py_BuildValue("(nNN)", ends ? (Py_ssize_t)ends->entries.used : 0,
                         PyBool_FromLong(!ends || !ends->is_inexact), classes);
}

static PyObject *core_forget_layout(Core *self, PyObject *number) {
    Owner *owner = owner_of(self, number);
    if (!owner) return NULL;
    groups_forget(&owner->groups);
    ends_forget_groups(&self->index, number_of(self, owner));
    owner->names_salts = owner->names_loras = -1;
    index_forget_media(&self->index, number_of(self, owner));
    return constant(Py_None);
}

static PyObject *told(int8_t yes) { return yes < 0 ? Py_None : yes ? Py_True : Py_False; }

static PyObject *core_layout(Core *self, PyObject *number) {
    const Owner *owner = owner_of(self, number);
    if (!owner) return NULL;
    return Py_BuildValue("(OO)", told(owner->names_salts), told(owner->names_loras));
}

typedef enum { STEP_DONE, STEP_LEFT, STEP_MORE, STEP_NO_MEMORY } Step;

static Step step_of(IndexResult result) {
    if (result == INDEX_NO_MEMORY) return STEP_NO_MEMORY;
    return result == INDEX_MORE ? STEP_MORE : STEP_DONE;
}

/* Whether the engine may have been able to reuse a part of the event's prompt before. */
static bool may_reuse(Core *self, uint32_t number, const Message *message, const WireEvent *event) {
    return ends_may_reuse(&self->index, number, message->batch.hashes + event->first_hash,
                          event->hash_count, event->pool.block_size);
}

/* Applies the next piece of a store; each later piece continues the chain of the one before. */
static Step apply_stored(Core *self, uint32_t number, Message *message, const WireEvent *event) {
    Owner *owner = &self->index.owners[number];
    if (event->names_salts > owner->names_salts) owner->names_salts = event->names_salts;
    if (event->names_loras > owner->names_loras) owner->names_loras = event->names_loras;
    uint32_t block_size = event->pool.block_size, left = event->hash_count - message->offset;
    if (!message->offset)
        message->may_repeat = !event->has_parent && may_reuse(self, number, message, event);
    uint32_t most = block_size < PIECE_TOKENS ? PIECE_TOKENS / block_size : 1;
    if (most > PIECE_BLOCKS) most = PIECE_BLOCKS;
    uint32_t count = left < most ? left : most;
    const uint64_t *hashes = message->batch.hashes + event->first_hash + message->offset;
    Stored stored = {
        .pool = event->pool,
        .hashes = hashes,
        .count = count,
        .following = left - count,
        .may_repeat = message->may_repeat,
        .has_parent = message->offset || event->has_parent,
        .parent = message->offset ? hashes[-1] : event->parent,
        .tokens = message->batch.tokens + event->first_token +
                  (size_t)message->offset * block_size,
        .lora = event->lora,
    };
    IndexResult result = index_store(&self->index, number, &stored);
    if (result == INDEX_OK)
        changes_store(&self->changes, &self->index, event, hashes);
    else
        self->changes.is_whole = false;
    if (result == INDEX_UNKNOWN_PARENT) return message->offset ? STEP_DONE : STEP_LEFT;
    if (result != INDEX_OK || count == left) return step_of(result);
    message->offset += count;
    return STEP_MORE;
}

/* Notes the blocks of a group that does not hold the whole prefix; only those on the device. An
 * engine that announces what it reuses names blocks of this group that it does not hold: all of
 * them, while a new prompt's are only the last ones, or no part of it could be reused. */
static Step apply_ends(Core *self, uint32_t number, Message *message, const WireEvent *event) {
    if (event->pool.tier) return STEP_DONE;
    if (event->pool.block_size || event->hash_count) {
        IndexResult noted = ends_note(&self->index, number, event->pool.group,
                                      event->pool.block_size, event->reach);
        if (noted != INDEX_OK) return step_of(noted);
    }
    if (!message->offset) {
        bool is_sparse = event->token_count != (uint64_t)event->hash_count * event->pool.block_size;
        message->may_repeat =
            !event->has_parent && !is_sparse && may_reuse(self, number, message, event);
        uint32_t need = ends_need(&self->index, number, event->pool.group);
        if (message->may_repeat && event->hash_count > need) return STEP_DONE;
    }
    const uint64_t *hashes = message->batch.hashes + event->first_hash;
    while (message->offset < event->hash_count) {
        if (index_is_over(&self->index)) return STEP_MORE;
        IndexResult result = ends_store(&self->index, number, event->pool.group,
                                        hashes[message->offset++], message->may_repeat);
        if (result == INDEX_OVER_LIMIT) self->index.owners[number].over_limit++;
        if (result != INDEX_OK) return step_of(result);
    }
    return STEP_DONE;
}

static Step apply_removed(Core *self, uint32_t number, Message *message, const WireEvent *event) {
    Owner *owner = &self->index.owners[number];
    const uint64_t *hashes = message->batch.hashes + event->first_hash;
    const uint32_t *lefts = message->batch.tokens + event->first_token;
    bool is_other = groups_admission(&owner->groups, event->pool.group) == GROUP_OTHER;
    bool has_ends = owner->ends && is_other && !event->pool.tier;
    while (message->offset < event->hash_count) {
        if (index_is_over(&self->index)) return STEP_MORE;
        uint32_t left = event->tells_left ? lefts[message->offset] : NOT_TOLD;
        uint64_t hash = hashes[message->offset++];
        if (has_ends)
            ends_remove(&self->index, number, event->pool.group, hash, left);
        else if (!index_remove(&self->index, number, event->pool.medium, event->pool.group, hash,
                               left) &&
            groups_admission(&owner->groups, event->pool.group) == GROUP_INDEXED)
            owner->removed_unknown++;
    }
    if (!has_ends) changes_remove(&self->changes, event, hashes, lefts);
    return STEP_DONE;
}

static Step apply_copied(Core *self, uint32_t number, Message *message, const WireEvent *event) {
    const uint64_t *hashes = message->batch.hashes + event->first_hash;
    while (message->offset < event->hash_count) {
        if (index_is_over(&self->index)) return STEP_MORE;
        IndexResult result =
            index_copy(&self->index, number, &event->pool, hashes + message->offset++, 1);
        if (result != INDEX_OK) return step_of(result);
    }
    return STEP_DONE;
}

/* Returns how a stored event's blocks are treated; notes its group, unless it is a copy. */
static Admission admit(Owner *owner, const WireEvent *event) {
    if (event->kind == EVENT_COPIED) return groups_admission(&owner->groups, event->pool.group);
    return groups_stored(&owner->groups, event->pool.group, event->group_kind);
}

/* Applies one event of a parsed message; if it is skipped, `fault` names why. */
static Step apply_event(Core *self, uint32_t number, Message *message, const WireEvent *event,
                        const char **fault) {
    switch (event->kind) {
        case EVENT_CLEARED: return step_of(index_clear_some(&self->index, number));
        case EVENT_REMOVED: return apply_removed(self, number, message, event);
        case EVENT_OTHER_LOCALITY: *fault = "other_locality"; return STEP_DONE;
        case EVENT_FOREIGN_OWNERSHIP: *fault = "foreign_ownership"; return STEP_DONE;
        default: break;
    }
    Admission admission = admit(&self->index.owners[number], event);
    if (admission == GROUP_DOUBTFUL) return STEP_LEFT;
    if (admission == GROUP_OTHER) {
        *fault = "other_attention_group";
        return event->kind != EVENT_OTHER_GROUP ? STEP_DONE
                                                : apply_ends(self, number, message, event);
    }
    if (event->kind == EVENT_STORED) return apply_stored(self, number, message, event);
    return apply_copied(self, number, message, event);
}

static bool append_name(PyObject *names, const char *name) {
    PyObject *text = PyUnicode_InternFromString(name);
    bool done = text && !PyList_Append(names, text);
    Py_XDECREF(text);
    return done;
}

/* Continues a parsed message until the limit of work; returns false if it set an exception. */
static bool apply_events(Core *self, uint32_t number, Message *message, Step *step) {
    for (*step = STEP_DONE; message->done < message->batch.event_count; message->done++) {
        const WireEvent *event = &message->batch.events[message->done];
        const char *fault = NULL;
        do {
            if (index_is_over(&self->index)) *step = STEP_MORE;
            else *step = apply_event(self, number, message, event, &fault);
        } while (*step == STEP_MORE && !index_is_over(&self->index));
        if (*step == STEP_NO_MEMORY) return PyErr_NoMemory(), false;
        if (*step != STEP_DONE) return true;
        if (fault && !append_name(message->faults, fault)) return false;
        message->clears |= event->kind == EVENT_CLEARED;
        message->offset = 0;
    }
    return true;
}

/* Continues a message; returns True if there is more, False for a surprise, else the outcome. */
static PyObject *proceed(Core *self, uint32_t number, Message *message, uint64_t work) {
    index_begin(&self->index, work);
    if (!message->parsed) {
        WireResult parsed = wire_parse(&self->index, &message->batch);
        if (parsed == WIRE_NO_MEMORY) return PyErr_NoMemory();
        if (parsed == WIRE_SURPRISE) return constant(Py_False);
        if (parsed == WIRE_MORE) return constant(Py_True);
        message->parsed = true;
    }
    Step step;
    if (!apply_events(self, number, message, &step)) return NULL;
    if (step == STEP_MORE) return constant(Py_True);
    if (step != STEP_DONE || message->clears || PyList_Size(message->faults))
        self->changes.is_whole = false;
    return Py_BuildValue("(nnON)", (Py_ssize_t)message->done,
                         (Py_ssize_t)message->batch.event_count,
                         message->clears ? Py_True : Py_False, PyList_AsTuple(message->faults));
}

/* Keeps the present message for its owner until the rest of it is requested. */
static bool put_aside(Core *self, Owner *owner) {
    Message *kept = PyMem_Malloc(sizeof *kept);
    if (!kept) return PyErr_NoMemory(), false;
    *kept = self->message;
    memset(&self->message, 0, sizeof self->message);
    owner->pending = kept;
    return true;
}

static PyObject *start(Core *self, PyObject *number, PyObject *payload, uint64_t work) {
    Owner *owner = owner_of(self, number);
    Message *message = &self->message;
    if (!owner) return NULL;
    abandon(owner);
    if (PyObject_GetBuffer(payload, &message->view, PyBUF_SIMPLE)) return NULL;
    message->parsed = message->clears = false;
    message->done = message->offset = 0;
    if (owner->ends) owner->ends->message = (owner->ends->message + 1) & END_MESSAGES;
    changes_begin(&self->changes, number_of(self, owner));
    message->faults = PyList_New(0);
    PyObject *answer = NULL;
    size_t length = (size_t)message->view.len;
    if (length > MAX_FAST_PAYLOAD ||
        wire_begin(&message->batch, message->view.buf, length) != WIRE_OK)
        answer = PyBool_FromLong(false);
    else if (message->faults)
        answer = proceed(self, number_of(self, owner), message, work);
    if (!answer || !PyTuple_Check(answer)) self->changes.is_whole = false;
    if (answer == Py_True && !put_aside(self, owner)) Py_CLEAR(answer);
    message_end(message);
    return answer;
}

static PyObject *core_apply(Core *self, PyObject *const *given, Py_ssize_t count) {
    if (!arguments_are(count, 2)) return NULL;
    PyObject *answer = start(self, given[0], given[1], UINT64_MAX);
    return answer == Py_False ? nothing(answer) : answer;
}

static PyObject *core_start(Core *self, PyObject *const *given, Py_ssize_t count) {
    uint64_t work;
    if (!arguments_are(count, 3) || !work_of(given[2], &work)) return NULL;
    return start(self, given[0], given[1], work);
}

static PyObject *core_proceed(Core *self, PyObject *const *given, Py_ssize_t count) {
    uint64_t work;
    if (!arguments_are(count, 2) || !work_of(given[1], &work)) return NULL;
    Owner *owner = owner_of(self, given[0]);
    if (!owner) return NULL;
    if (!owner->pending) {
        PyErr_SetString(PyExc_ValueError, "no message is applied in part");
        return NULL;
    }
    PyObject *answer = proceed(self, number_of(self, owner), owner->pending, work);
    if (answer != Py_True) abandon(owner);
    return answer;
}

static PyObject *core_abandon(Core *self, PyObject *number) {
    Owner *owner = owner_of(self, number);
    if (!owner) return NULL;
    abandon(owner);
    return constant(Py_None);
}

/* A record of several processes (kvstate/relay/records.py): rank, kind, length, then the number and
 * the stamp of its batch, which are kept together as the rank's mark. */
#define RECORD_BYTES 28u
#define MARK_AT 12u
#define MARK_BYTES 16u
#define RAW_BATCH 0u
#define CHANGES 11u
#define IS_SPECIAL 0x80000000u /* a rank whose batches are left to Python */
#define MAX_RUN_PAYLOAD 65536u /* a longer one is applied in steps */

typedef struct {
    Py_buffer records, owners, marks;
} RelayedBuffers;

typedef enum { RECORD_APPLIED, RECORD_LEFT, RECORD_NOTABLE, RECORD_FAILED } RecordResult;

/* Appends the changes of the last message to the records for other processes, if it was this owner's
 * and they are whole; returns how long these are then, or 0. */
static PyObject *core_pass_on(Core *self, PyObject *const *given, Py_ssize_t count) {
    if (!arguments_are(count, 4)) return NULL;
    const Owner *owner = owner_of(self, given[0]);
    if (!owner) return NULL;
    Changes *changes = &self->changes;
    if (!changes->is_whole || changes->owner != number_of(self, owner)) return PyLong_FromLong(0);
    size_t length = changes->buffer.length;
    uint32_t head[] = {(uint32_t)PyLong_AsUnsignedLong(given[1]), CHANGES, (uint32_t)length};
    uint64_t number = PyLong_AsUnsignedLongLong(given[2]);
    double stamp = PyFloat_AsDouble(given[3]);
    if (PyErr_Occurred()) return NULL;
    unsigned char *at = length > UINT32_MAX - RECORD_BYTES
                            ? NULL : buffer_room(&self->records, RECORD_BYTES + length);
    if (!at) return PyErr_NoMemory();
    memcpy(at, head, sizeof head);
    memcpy(at + MARK_AT, &number, sizeof number);
    memcpy(at + MARK_AT + sizeof number, &stamp, sizeof stamp);
    if (length) memcpy(at + RECORD_BYTES, changes->buffer.bytes, length);
    changes->is_whole = false;
    return PyLong_FromSize_t(self->records.length);
}

static PyObject *core_passed_on(Core *self, PyObject *Py_UNUSED(none)) {
    PyObject *records = PyBytes_FromStringAndSize((const char *)self->records.bytes,
                                                  (Py_ssize_t)self->records.length);
    if (records) self->records.length = 0;
    return records;
}

/* Applies one raw batch; LEFT: nothing of it. NOTABLE: it, or a part, with an outcome to look at. */
static RecordResult apply_raw(Core *self, uint32_t number, const unsigned char *payload,
                              uint32_t length) {
    Owner *owner = &self->index.owners[number];
    Message *message = &self->message;
    message->parsed = true;
    message->clears = false;
    message->done = message->offset = 0;
    if (wire_begin(&message->batch, payload, length) != WIRE_OK) return RECORD_LEFT;
    WireResult parsed = wire_parse(&self->index, &message->batch);
    if (parsed == WIRE_NO_MEMORY) return PyErr_NoMemory(), RECORD_FAILED;
    if (parsed != WIRE_OK) return RECORD_LEFT;
    if (owner->ends) owner->ends->message = (owner->ends->message + 1) & END_MESSAGES;
    Step step;
    if (!apply_events(self, number, message, &step)) return RECORD_FAILED;
    bool is_usual = step == STEP_DONE && !message->clears && !PyList_Size(message->faults);
    return is_usual ? RECORD_APPLIED : RECORD_NOTABLE;
}

/* Repeats what another process has changed. */
static RecordResult apply_changes(Core *self, uint32_t number, const unsigned char *payload,
                                  uint32_t length) {
    if (!changes_are_sound(payload, length)) return RECORD_LEFT;
    self->message.clears = false;
    self->message.done = self->message.batch.event_count = 0;
    if (changes_repeat(&self->index, number, payload, length) == INDEX_NO_MEMORY)
        return PyErr_NoMemory(), RECORD_FAILED;
    return RECORD_APPLIED;
}

/* Applies a batch of an owner; a new size of its blocks, or rejected ones, are to be looked at. */
static RecordResult apply_record(Core *self, uint32_t number, uint32_t kind,
                                 const unsigned char *payload, uint32_t length) {
    Owner *owner = &self->index.owners[number];
    uint32_t block_size = owner->block_size;
    uint64_t over_limit = owner->over_limit;
    abandon(owner);
    self->changes.is_whole = false;
    index_begin(&self->index, UINT64_MAX);
    RecordResult result = kind == CHANGES ? apply_changes(self, number, payload, length)
                                          : apply_raw(self, number, payload, length);
    bool is_notable = owner->block_size != block_size || owner->over_limit != over_limit;
    return result == RECORD_APPLIED && is_notable ? RECORD_NOTABLE : result;
}

/* Whether a record of a rank that is read here has to be applied by Python. */
static bool is_left(uint32_t kind, uint32_t owner, uint32_t length) {
    return kind == RAW_BATCH && (owner & IS_SPECIAL || length > MAX_RUN_PAYLOAD);
}

/* Has what the record at this byte changes on its way from memory, if it is one of changes. */
static void fetch_record(Core *self, const RelayedBuffers *given, Py_ssize_t at) {
    const unsigned char *bytes = given->records.buf;
    const uint32_t *owners = given->owners.buf;
    if (given->records.len - at < (Py_ssize_t)RECORD_BYTES) return;
    uint32_t head[3]; /* rank, kind, length */
    memcpy(head, bytes + at, sizeof head);
    bool is_whole = head[2] <= (size_t)(given->records.len - at) - RECORD_BYTES;
    bool is_known = head[0] < (size_t)given->owners.len / sizeof *owners && owners[head[0]];
    if (head[1] != CHANGES || !is_whole || !is_known) return;
    uint32_t number = (owners[head[0]] & ~IS_SPECIAL) - 1;
    if (number < self->index.owner_count && self->index.owners[number].present)
        changes_fetch(&self->index, number, bytes + at + RECORD_BYTES, head[2]);
}

/* Applies records from `at` on; returns where it stopped, or -1 with an exception. */
static Py_ssize_t apply_records(Core *self, const RelayedBuffers *given, Py_ssize_t at, uint64_t work,
                                bool *is_notable) {
    const unsigned char *bytes = given->records.buf;
    const uint32_t *owners = given->owners.buf;
    uint64_t used = 0;
    while (given->records.len - at >= (Py_ssize_t)RECORD_BYTES && used < work) {
        uint32_t head[3]; /* rank, kind, length */
        memcpy(head, bytes + at, sizeof head);
        uint32_t rank = head[0], kind = head[1], length = head[2];
        if (length > (size_t)(given->records.len - at) - RECORD_BYTES) break;
        bool is_known = rank < (size_t)given->owners.len / sizeof *owners && owners[rank];
        if (kind != RAW_BATCH && kind != CHANGES) break;
        if (is_known) {
            uint32_t number = (owners[rank] & ~IS_SPECIAL) - 1;
            if (is_left(kind, owners[rank], length)) break;
            if (number >= self->index.owner_count || !self->index.owners[number].present ||
                (size_t)given->marks.len < (rank + 1ull) * MARK_BYTES)
                return PyErr_SetString(PyExc_ValueError, "no such owner"), -1;
            fetch_record(self, given, at + (Py_ssize_t)(RECORD_BYTES + length));
            RecordResult result =
                apply_record(self, number, kind, bytes + at + RECORD_BYTES, length);
            if (result == RECORD_FAILED) return -1;
            if (result == RECORD_LEFT) break;
            *is_notable = result == RECORD_NOTABLE;
            if (*is_notable) break;
            memcpy((unsigned char *)given->marks.buf + (size_t)rank * MARK_BYTES,
                   bytes + at + MARK_AT, MARK_BYTES);
            used += self->index.work;
        }
        used++;
        at += (Py_ssize_t)(RECORD_BYTES + length);
    }
    return at;
}

static PyObject *apply_run(Core *self, const RelayedBuffers *given, Py_ssize_t at, uint64_t work) {
    Message *message = &self->message;
    bool is_notable = false;
    message->faults = PyList_New(0);
    if (!message->faults) return NULL;
    at = at < 0 ? 0 : at;
    at = apply_records(self, given, at, work, &is_notable);
    PyObject *answer = NULL;
    if (at >= 0 && !is_notable)
        answer = Py_BuildValue("(nO)", at, Py_None);
    else if (at >= 0)
        answer = Py_BuildValue("(n(nnON))", at, (Py_ssize_t)message->done,
                               (Py_ssize_t)message->batch.event_count,
                               message->clears ? Py_True : Py_False,
                               PyList_AsTuple(message->faults));
    message_end(message);
    return answer;
}

static PyObject *core_apply_run(Core *self, PyObject *const *given, Py_ssize_t count) {
    uint64_t work;
    if (!arguments_are(count, 5) || !work_of(given[4], &work)) return NULL;
    Py_ssize_t at = PyLong_AsSsize_t(given[1]);
    if (at == -1 && PyErr_Occurred()) return NULL;
    RelayedBuffers buffers;
    if (PyObject_GetBuffer(given[0], &buffers.records, PyBUF_SIMPLE)) return NULL;
    PyObject *answer = NULL;
    if (!PyObject_GetBuffer(given[3], &buffers.marks, PyBUF_WRITABLE)) {
        if (tokens_of(given[2], &buffers.owners)) {
            answer = apply_run(self, &buffers, at, work);
            PyBuffer_Release(&buffers.owners);
        }
        PyBuffer_Release(&buffers.marks);
    }
    PyBuffer_Release(&buffers.records);
    return answer;
}

/* Makes an overlap by the constructor of tuples, which knows what else a tuple has. */
static PyObject *constructed(Core *self, const Overlap *overlap) {
    PyObject *arguments = Py_BuildValue(
        "((I(IIII)III))", overlap->block_size, overlap->tiers[0], overlap->tiers[1],
        overlap->tiers[2], overlap->tiers[3], overlap->uncertain, overlap->rank,
        overlap->unusable);
    if (!arguments) return NULL;
    PyObject *made = self->new_tuple(self->overlap, arguments, NULL);
    Py_DECREF(arguments);
    return made;
}

/* (block_size, (device, host, disk, remote), uncertain, rank, unusable), as kvstate.overlap.Overlap */
static PyObject *overlap_object(Core *self, const Overlap *overlap) {
    if (self->new_tuple) return constructed(self, overlap);
    PyObject *tiers = Py_BuildValue("(IIII)", overlap->tiers[0], overlap->tiers[1],
                                    overlap->tiers[2], overlap->tiers[3]);
    PyObject *fields[] = {PyLong_FromUnsignedLong(overlap->block_size), tiers,
                          PyLong_FromUnsignedLong(overlap->uncertain),
                          PyLong_FromUnsignedLong(overlap->rank),
                          PyLong_FromUnsignedLong(overlap->unusable)};
    PyObject *made = PyType_GenericAlloc(self->overlap, 5);
    bool failed = !made;
    for (int n = 0; n < 5; n++) {
        failed |= !fields[n];
        if (made && fields[n])
            PyTuple_SetItem(made, n, fields[n]); /* takes the reference */
        else
            Py_XDECREF(fields[n]);
    }
    if (failed) Py_CLEAR(made);
    return made;
}

static PyObject *overlaps_by_name(Core *self, int64_t count, PyObject *names) {
    PyObject *answer = PyDict_New();
    for (int64_t n = 0; answer && n < count; n++) {
        const Overlap *overlap = &self->space.answer[n];
        PyObject *name = PyList_GetItem(names, overlap->worker);
        PyObject *value = name ? overlap_object(self, overlap) : NULL;
        if (!value || PyDict_SetItem(answer, name, value)) Py_CLEAR(answer);
        Py_XDECREF(value);
    }
    return answer;
}

#define ALL_TIERS TIERS

static PyObject *overlaps_on(Core *self, PyObject *const *given, uint32_t tier) {
    Prompt prompt;
    unsigned long model = PyLong_AsUnsignedLong(given[0]);
    if (PyErr_Occurred() || !lora_of(self, given[2], &prompt.lora) ||
        !extra_of(self, given[3], &prompt.first))
        return NULL;
    Py_buffer view;
    if (model >= self->index.model_count) {
        PyErr_SetString(PyExc_ValueError, "no such model");
        return NULL;
    }
    if (!tokens_of(given[1], &view)) return NULL;
    prompt.model = (uint32_t)model;
    prompt.tokens = view.buf;
    prompt.count = (size_t)view.len / 4;
    int64_t found = tier == ALL_TIERS
                        ? index_overlaps(&self->index, &self->space, &prompt)
                        : index_overlaps_on(&self->index, &self->space, &prompt, tier);
    PyBuffer_Release(&view);
    return found < 0 ? PyErr_NoMemory() : overlaps_by_name(self, found, given[4]);
}

static PyObject *core_overlaps(Core *self, PyObject *const *given, Py_ssize_t count) {
    return arguments_are(count, 5) ? overlaps_on(self, given, ALL_TIERS) : NULL;
}

static PyObject *core_overlaps_on(Core *self, PyObject *const *given, Py_ssize_t count) {
    if (!arguments_are(count, 6)) return NULL;
    unsigned long tier = PyLong_AsUnsignedLong(given[5]);
    if (PyErr_Occurred()) return NULL;
    if (tier >= TIERS) {
        PyErr_SetString(PyExc_ValueError, "no such tier");
        return NULL;
    }
    return overlaps_on(self, given, (uint32_t)tier);
}

/* Converts the number of a slot for a watched block. */
static bool slot_of(PyObject *object, uint32_t *slot) {
    unsigned long number = PyLong_AsUnsignedLong(object);
    if (PyErr_Occurred()) return false;
    *slot = (uint32_t)number;
    if (number < MAX_WATCHES) return true;
    PyErr_SetString(PyExc_ValueError, "no such slot");
    return false;
}

static PyObject *core_watch(Core *self, PyObject *const *given, Py_ssize_t count) {
    if (!arguments_are(count, 6)) return NULL;
    const Owner *owner = owner_of(self, given[0]);
    uint32_t slot;
    Prompt prompt = {0};
    if (!owner || !slot_of(given[1], &slot) || !lora_of(self, given[3], &prompt.lora) ||
        !extra_of(self, given[4], &prompt.first))
        return NULL;
    unsigned long block_size = PyLong_AsUnsignedLong(given[5]);
    if (PyErr_Occurred()) return NULL;
    if (!block_size || block_size > MAX_BLOCK_SIZE) {
        PyErr_SetString(PyExc_ValueError, "no such block size");
        return NULL;
    }
    Py_buffer view;
    if (!tokens_of(given[2], &view)) return NULL;
    prompt.tokens = view.buf;
    prompt.count = (size_t)view.len / 4;
    IndexResult result = index_watch(&self->index, number_of(self, owner), slot, &prompt,
                                     (uint32_t)block_size);
    PyBuffer_Release(&view);
    return result == INDEX_OK ? constant(Py_None) : PyErr_NoMemory();
}

static PyObject *core_was_stored(Core *self, PyObject *const *given, Py_ssize_t count) {
    if (!arguments_are(count, 2)) return NULL;
    const Owner *owner = owner_of(self, given[0]);
    uint32_t slot;
    if (!owner || !slot_of(given[1], &slot)) return NULL;
    return PyBool_FromLong(index_was_stored(&self->index, number_of(self, owner), slot));
}

static PyObject *core_remember_removals(Core *self, PyObject *count) {
    unsigned long room = PyLong_AsUnsignedLong(count);
    if (PyErr_Occurred()) return NULL;
    if (!room || room > MAX_REMOVALS || self->index.removal_room) {
        PyErr_SetString(PyExc_ValueError, "it is to be set once, to a number within the limit");
        return NULL;
    }
    self->index.removal_room = (uint32_t)room;
    return constant(Py_None);
}

static PyObject *core_note_time(Core *self, PyObject *seconds) {
    double now = PyFloat_AsDouble(seconds);
    if (PyErr_Occurred()) return NULL;
    self->index.now = now;
    return constant(Py_None);
}

static PyObject *core_removed_at(Core *self, PyObject *const *given, Py_ssize_t count) {
    if (!arguments_are(count, 5)) return NULL;
    const Owner *owner = owner_of(self, given[0]);
    Prompt prompt = {0};
    if (!owner || !lora_of(self, given[2], &prompt.lora) || !extra_of(self, given[3], &prompt.first))
        return NULL;
    size_t blocks = PyLong_AsSize_t(given[4]);
    if (PyErr_Occurred()) return NULL;
    Py_buffer view;
    if (!tokens_of(given[1], &view)) return NULL;
    prompt.tokens = view.buf;
    prompt.count = (size_t)view.len / 4;
    double at = index_removed_at(&self->index, number_of(self, owner), &prompt, blocks);
    PyBuffer_Release(&view);
    return isnan(at) ? constant(Py_None) : PyFloat_FromDouble(at);
}

static PyObject *core_status(Core *self, PyObject *number) {
    const Owner *owner = owner_of(self, number);
    if (!owner) return NULL;
    return Py_BuildValue("{s:n,s:n,s:I,s:K,s:K,s:K,s:K,s:K}",
                         "blocks", (Py_ssize_t)owner->blocks,
                         "block_size", (Py_ssize_t)owner->block_size,
                         "doubted", owner->doubted,
                         "removed_unknown", (unsigned long long)owner->removed_unknown,
                         "removed_certain", (unsigned long long)owner->removed_certain,
                         "restored_with_other_tokens",
                         (unsigned long long)owner->restored_with_other_tokens,
                         "over_limit", (unsigned long long)owner->over_limit,
                         "copied_unknown", (unsigned long long)owner->copied_unknown);
}

static PyObject *core_tiers(Core *self, PyObject *const *given, Py_ssize_t count) {
    if (!arguments_are(count, 2)) return NULL;
    const Owner *owner = owner_of(self, given[0]);
    int uncertain = PyObject_IsTrue(given[1]);
    if (!owner || uncertain < 0) return NULL;
    Py_ssize_t tiers[TIERS];
    for (uint32_t tier = 0; tier < TIERS; tier++)
        tiers[tier] = (Py_ssize_t)index_count_tier(&self->index, number_of(self, owner), tier,
                                                   uncertain);
    return Py_BuildValue("(nnnn)", tiers[0], tiers[1], tiers[2], tiers[3]);
}

static PyObject *core_expire(Core *self, PyObject *const *given, Py_ssize_t count) {
    if (!arguments_are(count, 2)) return NULL;
    const Owner *owner = owner_of(self, given[0]);
    size_t slots = owner ? PyLong_AsSize_t(given[1]) : 0;
    if (!owner || PyErr_Occurred()) return NULL;
    return PyBool_FromLong(index_expire(&self->index, number_of(self, owner), slots));
}

/* Returns a buffer's bytes, and frees it. */
static PyObject *bytes_in(Buffer *buffer) {
    PyObject *made =
        PyBytes_FromStringAndSize((const char *)buffer->bytes, (Py_ssize_t)buffer->length);
    free(buffer->bytes);
    return made;
}

static PyObject *core_saved_learned(Core *self, PyObject *number) {
    const Owner *owner = owner_of(self, number);
    if (!owner) return NULL;
    Buffer buffer = {0};
    if (!persist_learned(owner, &buffer)) return PyErr_NoMemory();
    return bytes_in(&buffer);
}

static PyObject *core_put_learned(Core *self, PyObject *const *given, Py_ssize_t count) {
    if (!arguments_are(count, 2)) return NULL;
    const Owner *owner = owner_of(self, given[0]);
    char *bytes;
    Py_ssize_t length;
    if (!owner || PyBytes_AsStringAndSize(given[1], &bytes, &length)) return NULL;
    index_begin(&self->index, UINT64_MAX);
    return PyBool_FromLong(
        persist_put_learned(&self->index, number_of(self, owner), (const unsigned char *)bytes, (size_t)length));
}

static PyObject *core_saved_rows(Core *self, PyObject *const *given, Py_ssize_t count) {
    uint64_t work, at = 0;
    if (!arguments_are(count, 3) || !work_of(given[2], &work) || !work_of(given[1], &at))
        return NULL;
    const Owner *owner = owner_of(self, given[0]);
    if (!owner) return NULL;
    index_begin(&self->index, work);
    Buffer buffer = {0};
    if (!persist_rows(&self->index, number_of(self, owner), &at, &buffer)) {
        free(buffer.bytes);
        return PyErr_NoMemory();
    }
    PyObject *rows = bytes_in(&buffer);
    if (!rows) return NULL;
    return at == SAVED_ALL ? Py_BuildValue("(NO)", rows, Py_None)
                           : Py_BuildValue("(NK)", rows, (unsigned long long)at);
}

static PyObject *core_put_rows(Core *self, PyObject *const *given, Py_ssize_t count) {
    uint64_t work;
    if (!arguments_are(count, 4) || !work_of(given[3], &work)) return NULL;
    const Owner *owner = owner_of(self, given[0]);
    char *bytes;
    Py_ssize_t length;
    if (!owner || PyBytes_AsStringAndSize(given[1], &bytes, &length)) return NULL;
    size_t at = PyLong_AsSize_t(given[2]);
    if (PyErr_Occurred()) return NULL;
    index_begin(&self->index, work);
    IndexResult result =
        persist_put_rows(&self->index, number_of(self, owner), (const unsigned char *)bytes,
                         (size_t)length, &at);
    if (result == INDEX_NO_MEMORY) return PyErr_NoMemory();
    if (result == INDEX_OK) return PyLong_FromSsize_t(length);
    if (result == INDEX_MORE) return PyLong_FromSize_t(at);
    PyErr_SetString(PyExc_ValueError, "these are no rows of an owner");
    return NULL;
}

static PyObject *core_memory(Core *self, PyObject *Py_UNUSED(none)) {
    return PyLong_FromSize_t(index_bytes(&self->index));
}

static PyObject *core_check(Core *self, PyObject *Py_UNUSED(none)) {
    const char *fault = index_check(&self->index);
    if (!fault) return constant(Py_None);
    PyErr_SetString(PyExc_AssertionError, fault);
    return NULL;
}

#define FAST(name) {#name, (PyCFunction)(void (*)(void))core_##name, METH_FASTCALL, NULL}
#define ONE(name) {#name, (PyCFunction)core_##name, METH_O, NULL}
#define NONE(name) {#name, (PyCFunction)core_##name, METH_NOARGS, NULL}

static PyMethodDef core_methods[] = {
    ONE(add_model), FAST(add_owner), ONE(remove_owner), ONE(clear),        ONE(demote),
    FAST(trust),    FAST(store),     FAST(copy),        FAST(lend),        FAST(remove),      FAST(apply),
    FAST(start),    FAST(proceed),   ONE(abandon),      FAST(clear_some),  FAST(demote_some),
    FAST(admit),    FAST(admission), ONE(layout),       ONE(forget_layout),
    FAST(overlaps), FAST(overlaps_on), ONE(status),     FAST(tiers),       NONE(memory),        NONE(check),
    FAST(expire),   FAST(limit),
    ONE(saved_learned), FAST(put_learned), FAST(saved_rows), FAST(put_rows),
    FAST(expire),   FAST(limit),    FAST(note_group),   FAST(store_ends), FAST(remove_end),
    FAST(drop_last), ONE(other_groups), ONE(begin_message), FAST(may_reuse),
    ONE(announce_copies), FAST(watch),       FAST(was_stored),  ONE(remember_removals), ONE(note_time), FAST(removed_at),
    FAST(apply_run),   FAST(pass_on),     NONE(passed_on),
    {NULL, NULL, 0, NULL},
};

static PyType_Slot core_slots[] = {
    {Py_tp_doc, "The core; kvstate/_core.pyi describes it."},
    {Py_tp_new, core_new},
    {Py_tp_dealloc, core_dealloc},
    {Py_tp_methods, core_methods},
    {0, NULL},
};

static PyType_Spec core_spec = {"kvstate._core.Core", sizeof(Core), 0, Py_TPFLAGS_DEFAULT,
                                core_slots};

/* Below this, releasing the interpreter lock costs more than the scan. */
#define BRIEF_BYTES 65536

/* Most lists and objects within each other that are looked into, since that recurses. */
#define MAX_PARTS_DEPTH 16

static PyObject *marks_in(PyObject *body, bool is_outside, size_t max_quotes) {
    char *bytes;
    Py_ssize_t length;
    if (PyBytes_AsStringAndSize(body, &bytes, &length)) return NULL;
    const uint8_t *scanned = (const uint8_t *)bytes;
    PyThreadState *left = length > BRIEF_BYTES ? PyEval_SaveThread() : NULL;
    Marks found = is_outside ? scan_marks_outside(scanned, (size_t)length, max_quotes)
                             : scan_marks(scanned, (size_t)length);
    if (left) PyEval_RestoreThread(left);
    return Py_BuildValue("(nnn)", (Py_ssize_t)found.brackets, (Py_ssize_t)found.quotes,
                         (Py_ssize_t)found.commas);
}

static PyObject *module_marks(PyObject *Py_UNUSED(module), PyObject *body) {
    return marks_in(body, false, 0);
}

static PyObject *module_sizes(PyObject *Py_UNUSED(module), PyObject *body) {
    char *bytes;
    Py_ssize_t length;
    if (PyBytes_AsStringAndSize(body, &bytes, &length)) return NULL;
    Sizes sizes = scan_sizes((const uint8_t *)bytes, (size_t)length);
    return Py_BuildValue("(nn)", (Py_ssize_t)sizes.values, (Py_ssize_t)sizes.text_bytes);
}

static PyObject *module_marks_outside(PyObject *Py_UNUSED(module), PyObject *const *given,
                                      Py_ssize_t count) {
    if (!arguments_are(count, 2)) return NULL;
    size_t max_quotes = PyLong_AsSize_t(given[1]);
    return PyErr_Occurred() ? NULL : marks_in(given[0], true, max_quotes);
}

static PyObject *listed(const Members *members) {
    PyObject *made = PyTuple_New((Py_ssize_t)members->found);
    for (size_t n = 0; made && n < members->found; n++) {
        const Member *one = &members->each[n];
        PyObject *member = Py_BuildValue("(nnnnn)", (Py_ssize_t)one->name, (Py_ssize_t)one->start,
                                         (Py_ssize_t)one->end, (Py_ssize_t)one->value,
                                         (Py_ssize_t)one->value_end);
        if (!member || PyTuple_SetItem(made, (Py_ssize_t)n, member)) Py_CLEAR(made);
    }
    return made;
}

static bool names_of(PyObject *given, Names *names) {
    char *bytes;
    Py_ssize_t length;
    if (PyBytes_AsStringAndSize(given, &bytes, &length)) return false;
    *names = (Names){(const uint8_t *)bytes, (size_t)length};
    return true;
}

/* members(body, start, end, names, walked, parts, depth): what was found, or the number of the
 * reading that failed. */
static PyObject *module_members(PyObject *Py_UNUSED(module), PyObject *const *given,
                                Py_ssize_t count) {
    if (!arguments_are(count, 7)) return NULL;
    Names body, names;
    Parts parts;
    size_t start = PyLong_AsSize_t(given[1]), end = PyLong_AsSize_t(given[2]);
    parts.walked = PyLong_AsSize_t(given[4]);
    parts.depth = PyLong_AsSize_t(given[6]);
    if (PyErr_Occurred() || !names_of(given[0], &body) || !names_of(given[3], &names) ||
        !names_of(given[5], &parts.names))
        return NULL;
    if (start > end || end > body.length || parts.depth > MAX_PARTS_DEPTH) {
        PyErr_SetString(PyExc_ValueError, "out of bounds");
        return NULL;
    }
    Members members;
    PyThreadState *left = end - start > BRIEF_BYTES ? PyEval_SaveThread() : NULL;
    Reading reading = scan_members(body.bytes, start, end, names, &parts, &members);
    if (left) PyEval_RestoreThread(left);
    if (reading != READ_ALL) return PyLong_FromLong(reading);
    PyObject *found = listed(&members), *is_named = members.is_named ? Py_True : Py_False;
    if (!found) return NULL;
    return Py_BuildValue("(NnnO)", found, (Py_ssize_t)members.count, (Py_ssize_t)members.close,
                         is_named);
}

/* braces(body): the place of the last one, and whether nothing is between them; or None. */
static PyObject *module_braces(PyObject *Py_UNUSED(module), PyObject *given) {
    Names body;
    if (!names_of(given, &body)) return NULL;
    size_t close;
    bool is_empty;
    PyThreadState *left = body.length > BRIEF_BYTES ? PyEval_SaveThread() : NULL;
    bool has_both = scan_braces(body.bytes, body.length, &close, &is_empty);
    if (left) PyEval_RestoreThread(left);
    if (!has_both) Py_RETURN_NONE;
    return Py_BuildValue("(nO)", (Py_ssize_t)close, is_empty ? Py_True : Py_False);
}

/* Reads (start, end, bytes), which must lie behind the changes before and within the body. */
static bool edit_of(PyObject *given, size_t from, size_t length, Edit *edit) {
    Py_ssize_t start, end, size;
    char *bytes;
    PyObject *written;
    if (!PyArg_ParseTuple(given, "nnS", &start, &end, &written) ||
        PyBytes_AsStringAndSize(written, &bytes, &size))
        return false;
    *edit = (Edit){(size_t)start, (size_t)end, (const uint8_t *)bytes, (size_t)size};
    if (start >= 0 && end >= start && edit->start >= from && edit->end <= length) return true;
    PyErr_SetString(PyExc_ValueError, "out of order, or out of bounds");
    return false;
}

/* Reads a tuple of changes; returns the length of what they make, -1 with an exception. */
static Py_ssize_t edits_of(PyObject *given, size_t length, Edit *edits, size_t count) {
    size_t made = length, from = 0;
    for (size_t n = 0; n < count; n++) {
        PyObject *one = PyTuple_GetItem(given, (Py_ssize_t)n);
        if (!one || !PyTuple_Check(one)) {
            PyErr_SetString(PyExc_TypeError, "want tuples of (start, end, bytes)");
            return -1;
        }
        if (!edit_of(one, from, length, &edits[n])) return -1;
        from = edits[n].end;
        made += edits[n].length - (edits[n].end - edits[n].start);
    }
    return (Py_ssize_t)made;
}

/* splice(body, ((start, end, bytes), ...)): the caller's tuple holds all that is copied. */
static PyObject *module_splice(PyObject *Py_UNUSED(module), PyObject *const *given,
                               Py_ssize_t count) {
    Names body;
    if (!arguments_are(count, 2) || !names_of(given[0], &body)) return NULL;
    Py_ssize_t edit_count = PyTuple_Size(given[1]);
    if (edit_count < 0) return NULL;
    Edit *edits = PyMem_Malloc(((size_t)edit_count + 1) * sizeof(Edit));
    if (!edits) return PyErr_NoMemory();
    Py_ssize_t length = edits_of(given[1], body.length, edits, (size_t)edit_count);
    PyObject *made = length < 0 ? NULL : PyBytes_FromStringAndSize(NULL, length);
    if (made) {
        uint8_t *bytes = (uint8_t *)PyBytes_AsString(made);
        PyThreadState *left = length > BRIEF_BYTES ? PyEval_SaveThread() : NULL;
        scan_splice(body.bytes, body.length, edits, (size_t)edit_count, bytes);
        if (left) PyEval_RestoreThread(left);
    }
    PyMem_Free(edits);
    return made;
}

static PyMethodDef module_functions[] = {
    {"marks", module_marks, METH_O, NULL},
    {"sizes", module_sizes, METH_O, NULL},
    {"marks_outside", (PyCFunction)(void (*)(void))module_marks_outside, METH_FASTCALL, NULL},
    {"members", (PyCFunction)(void (*)(void))module_members, METH_FASTCALL, NULL},
    {"braces", module_braces, METH_O, NULL},
    {"splice", (PyCFunction)(void (*)(void))module_splice, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_core", "The compiled core.", -1,
                                    module_functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__core(void) {
    PyObject *made = PyModule_Create(&module);
    PyObject *type = made ? PyType_FromSpec(&core_spec) : NULL;
    if (!type || PyModule_AddIntConstant(made, "LAYOUT", PERSIST_LAYOUT) ||
        PyModule_AddObject(made, "Core", type)) {
        Py_XDECREF(type);
        Py_XDECREF(made);
        return NULL;
    }
    return made;
}
