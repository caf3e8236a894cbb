from pagedlm.cli import main; raise SystemExit(main())
